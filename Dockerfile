# The compiled clock is built in the first stage; the image itself has no compiler.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY . /src
RUN pip wheel --no-cache-dir --no-deps -w /wheels /src /src/validation

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels \
 && stagec doctor && useradd --create-home user
USER user
WORKDIR /job
ENTRYPOINT ["stagec"]

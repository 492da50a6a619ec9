"""What pyproject.toml cannot say: the loop of the clock is compiled, where there is a compiler."""

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class CompileIfPossible(build_ext):
    """Without a compiler the loop stays Python."""

    def build_extension(self, ext: Extension) -> None:
        """Build an extension; that there is no such command is an error of compiling, too."""
        try:
            super().build_extension(ext)
        except OSError as problem:
            raise CompileError(str(problem)) from problem


LOOP = Extension("stagec.time.clock.loop", ["stagec/time/clock/loop.py"])
EXTENSIONS = cythonize([LOOP], build_dir="build/cython", language_level=3)
for extension in EXTENSIONS:
    extension.optional = True

setup(cmdclass={"build_ext": CompileIfPossible}, ext_modules=EXTENSIONS)

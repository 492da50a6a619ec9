"""Batches of requests that follow each other, with an update of the weights between them: the
rollouts of reinforcement learning.

A batch begins with `count` requests at the server: those that the batch before has left, which keep
their tokens and lose their caches to new weights (partial rollouts: Kimi k1.5, arXiv 2501.12599,
section 2.6.2), and new ones. It ends when `quota` of them are done, which are then trained. With
`ahead` of n, batch i + 1 begins as soon as batch i - n is trained (`max_async_level` of prime-rl;
0: servers wait for the trainer; 1: one step off policy, as in verl). Of batch i, that ends at e(i):

    trained(i) = max(e(i), trained(i - 1)) + train
    begin(i + 1) = max(e(i), trained(i - ahead)), and `update` later where weights are new by then
"""

from dataclasses import dataclass, field

from stagec.serving.served import ServedRequest


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """A batch: when it began and ended, when its training ended, in femtoseconds, with weights of
    how many updates, how many requests the batch before had left, the tokens of its answers, and by
    how many updates these are older than the weights that they train, on average and at most.
    `busy` and `held` are integrals over its time of the replicas that had steps and that occupied
    ranks, of each pool."""

    begin: int
    end: int
    trained: int
    version: int
    carried: int
    tokens: int
    stale: float
    oldest: int
    busy: tuple[int, ...]
    held: tuple[int, ...]


@dataclass
class Rollouts:
    """So many batches, `iterations`; times of `train` and `update` are in femtoseconds. Turns of a
    conversation are one request of these."""

    count: int
    quota: int
    iterations: int = 1
    ahead: int = 0
    train: int = 0
    update: int = 0
    batches: list[RolloutBatch] = field(default_factory=list[RolloutBatch])

    def __post_init__(self) -> None:
        self._begin = self.version = self._open = self._carried = 0
        self.begun = False
        self._since: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._done: list[list[tuple[int, int]]] = []  # of each request tokens by their versions
        self._made: dict[int, list[tuple[int, int]]] = {}
        self._seen: dict[int, int] = {}  # tokens that are counted, of each turn

    @property
    def requests(self) -> int:
        """The requests of all batches."""
        return self.count + (self.iterations - 1) * self.quota

    @property
    def over(self) -> bool:
        """Whether the last batch has ended."""
        return len(self.batches) == self.iterations

    @property
    def full(self) -> bool:
        """Whether enough requests of the batch are done."""
        return len(self._done) >= self.quota

    def begin(self, now: int, busy: tuple[int, ...], held: tuple[int, ...]) -> int:
        """A batch begins; how many new requests it has."""
        self.begun, self._begin, self._since, self._carried = True, now, (busy, held), self._open
        new = self.count - self._open - len(self._done)
        self._open += new
        return new

    def ended(self, job: ServedRequest, then: ServedRequest | None) -> None:
        """A request, or a turn that another one follows, is done."""
        self.mark(job)
        self._seen.pop(job.number, None)
        made = self._made.pop(job.number)
        if then is not None:
            self._made[then.number] = made
        else:
            self._done.append(made)
            self._open -= 1

    def mark(self, job: ServedRequest) -> None:
        """What a request has got since it was marked last is of the weights that servers have."""
        new = job.generated - self._seen.get(job.number, 0)
        self._made.setdefault(job.number, []).append((self.version, new))
        self._seen[job.number] = job.generated

    def close(self, now: int, busy: tuple[int, ...], held: tuple[int, ...]) -> None:
        """The batch ends, with the first ones that were done."""
        self.begun, number = False, len(self.batches)
        made = [each for request in self._done[: self.quota] for each in request if each[1]]
        del self._done[: self.quota]
        tokens = sum(count for _, count in made)
        stale = sum((number - version) * count for version, count in made) / tokens
        oldest = max(number - version for version, _ in made)
        free = self.batches[-1].trained if self.batches else 0
        was_busy, was_held = self._since
        self.batches.append(
            RolloutBatch(
                self._begin,
                now,
                max(now, free) + self.train,
                self.version,
                self._carried,
                tokens,
                stale,
                oldest,
                tuple(a - b for a, b in zip(busy, was_busy, strict=True)),
                tuple(a - b for a, b in zip(held, was_held, strict=True)),
            )
        )

    def following(self, now: int) -> tuple[int, int]:
        """When the next batch begins, after one that ends now, and the updates that its weights
        have had."""
        before = len(self.batches) - 1 - self.ahead
        start = max(now, self.batches[before].trained) if before >= 0 else now
        version = sum(batch.trained <= start for batch in self.batches)
        return start + (self.update if version > self.version else 0), version

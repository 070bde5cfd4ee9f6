"""The independent evaluator of problem `lengths`.

(1) Every sample is in exactly one micro-batch.
(2) The samples of a micro-batch of replica r have C_r tokens at most.
(3) Replica r has K_r micro-batches with samples at most.
"""

from collections import Counter
from collections.abc import Iterator

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision, LengthsReplica
from hetplan.solvers.registry import Evaluation


def evaluate(data: LengthsData, decision: LengthsDecision) -> Evaluation:
    """The slowest replica's seconds, with the mean over the replicas; or the violations."""
    got, expected = len(decision.micro_batches), len(data.replicas)
    if got != expected:
        return Evaluation(None, (f"micro_batches has {got} replicas, expected {expected}",))
    violations = (*placed_once(data, decision), *within_limits(data, decision))
    if violations:
        return Evaluation(None, violations)
    seconds = []
    for replica, batches in zip(data.replicas, decision.micro_batches, strict=True):
        lengths = [[data.samples[i] for i in batch] for batch in batches]
        seconds.append(replica_seconds(replica, lengths))
    return Evaluation(max(seconds), parts={"mean": sum(seconds) / len(seconds)})


def placed_once(data: LengthsData, decision: LengthsDecision) -> Iterator[str]:  # (1)
    """A violation for each sample that does not exist or is not placed once."""
    times = Counter(i for replica in decision.micro_batches for batch in replica for i in batch)
    for i in sorted(times):
        if i >= len(data.samples):
            yield f"sample {i} does not exist, there are {len(data.samples)}"
    for i in range(len(data.samples)):
        if times[i] != 1:
            yield f"sample {i} is in {times[i]} micro-batches, expected 1"


def within_limits(data: LengthsData, decision: LengthsDecision) -> Iterator[str]:  # (2), (3)
    """A violation for each micro-batch with too many tokens, and each replica with too many
    micro-batches."""
    for r, (replica, batches) in enumerate(zip(data.replicas, decision.micro_batches, strict=True)):
        for k, batch in enumerate(batches):
            tokens = sum(data.samples[i] for i in batch if i < len(data.samples))
            if tokens > replica.tokens:
                place = f"micro_batches[{r}][{k}]"
                yield f"{place} has {tokens} tokens, expected at most {replica.tokens}"
        used = sum(1 for batch in batches if batch)
        if used > replica.micro_batches:
            yield (
                f"micro_batches[{r}] has {used} micro-batches with samples, expected at most "
                f"{replica.micro_batches}"
            )


def replica_seconds(replica: LengthsReplica, batches: list[list[int]]) -> float:
    """Seconds of a replica. batches: tokens of the samples of each micro-batch."""
    slowest_stage, longest_fill = 0.0, 0.0
    for batch in batches:
        if not batch:
            continue
        tokens, squares = sum(batch), sum(length**2 for length in batch)
        slowest_stage += replica.micro_batch_seconds
        slowest_stage += replica.token_seconds * tokens + replica.squared_token_seconds * squares
        fill = replica.fill_micro_batch_seconds
        fill += replica.fill_token_seconds * tokens
        fill += replica.fill_squared_token_seconds * squares
        longest_fill = max(longest_fill, fill)
    return slowest_stage + longest_fill

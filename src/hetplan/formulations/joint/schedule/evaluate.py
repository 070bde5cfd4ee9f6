"""The evaluator of an order of passes: it runs the order event by event, and shares no code with
the methods that find one.

Rules, which are those of the replay (replays/simulator). A stage does its passes in their order. A
pass begins when the stage has done the pass before it and its message is there. A message begins
when it is computed and, where receivers wait, when its receiver has done the pass before; then it
waits until all its ports are free. Of several messages the one that can begin first does; of
messages of one moment those that have waited come first, in the order in which they asked, then
lower micro-batches, then activations, then lower virtual stages.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import InputError
from hetplan.formulations.joint.schedule.data import Message, Order, Pass, PassProblem

TIE = 1e-6  # relative difference of times of one moment, as in the replay
MEMORY_TOLERANCE = 1e-6  # relative; sums of bytes differ by rounding


class DeadLock(InputError):
    """Stages wait for each other in a circle."""


@dataclass(frozen=True)
class Verdict:
    """The seconds and the memory of an order of passes."""

    seconds: float  # until every stage has done its last pass and the work behind it
    begin: dict[Pass, float]  # seconds at which each pass begins to compute
    sent: dict[Pass, float]  # seconds at which the message of each pass begins
    peak_bytes: tuple[float, ...]  # [S] the most bytes that each stage keeps at the same time
    violations: tuple[str, ...]  # a line for each stage that keeps more than its room


def evaluate(problem: PassProblem, order: Order) -> Verdict:
    """The seconds and bytes of an order. Raises InputError where it has not every pass once on its
    stage, DeadLock where stages wait for each other; the text names the circle."""
    check_passes(problem, order)
    run = Simulation(problem, order)
    run.go()
    peaks = tuple(peak_bytes(problem, passes) for passes in order)
    violations = tuple(stages_have_room(problem, peaks))
    return Verdict(run.seconds, run.begin, run.sent, peaks, violations)


def check_passes(problem: PassProblem, order: Order) -> None:
    """Raise InputError unless the order has every pass once, on the stage of its virtual stage."""
    if len(order) != problem.stages:
        due_stages = f"{problem.stages} stages"
        raise InputError("wrong length", where="passes", got=len(order), expected=due_stages)
    for s, passes in enumerate(order):
        got = Counter(passes)
        due = Counter(one for one in problem.passes if problem.place[one.virtual] == s)
        for one in [*(got - due), *(due - got)]:
            raise InputError(
                f"{name(one)} is not there as often as it must be",
                where=f"passes[{s}]",
                got=f"{got[one]} times",
                expected=f"{due[one]} times",
            )


def name(one: Pass) -> str:
    """A pass for people."""
    return f"{one.kind}{one.micro} of virtual stage {one.virtual}"


class Simulation:
    """One run of an order."""

    def __init__(self, problem: PassProblem, order: Order) -> None:
        self.problem, self.order = problem, order
        self.begin: dict[Pass, float] = {}
        self.sent: dict[Pass, float] = {}
        self.end: dict[Pass, float] = {}
        self.arrived: dict[Pass, float] = {}  # when the message of a pass is there
        self.done = [0] * problem.stages  # passes that each stage has done
        self.free = [0.0] * problem.stages  # when each stage has done them
        self.port_free: dict[int, float] = {}
        self.waiting: dict[Pass, float] = {}  # messages that have asked for ports, and when

    def go(self) -> None:
        """Run the order. Raises DeadLock where stages wait for each other."""
        while True:
            self.compute()
            if not self.waiting:
                break
            self.send(self.next_message())
        if any(done < len(passes) for done, passes in zip(self.done, self.order, strict=True)):
            raise DeadLock(f"stages wait for each other: {self.circle()}", where="passes")

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return max(free + self.problem.tail(s) for s, free in enumerate(self.free))

    def compute(self) -> None:
        """Do all passes whose messages are there, and ask for the messages of the others."""
        again = True
        while again:
            again = False
            for s, passes in enumerate(self.order):
                while self.done[s] < len(passes) and self.is_ready(passes[self.done[s]], s):
                    one = passes[self.done[s]]
                    self.begin[one] = max(self.free[s], self.arrived.get(one, 0.0))
                    self.end[one] = self.free[s] = self.begin[one] + self.problem.seconds(one)
                    self.done[s] += 1
                    again = True
                    if not self.problem.receiver_waits:
                        self.ask_of(one)

    def is_ready(self, one: Pass, s: int) -> bool:
        """Whether the next pass of a stage can begin. A pass that needs a message asks for it."""
        if one in self.arrived:
            return True
        needs = self.needs(one)
        if needs is None:
            return True
        if needs not in self.end:
            return False
        if self.problem.message(one).lasts == 0 or self.is_local(one):
            self.arrived[one] = self.end[needs]
            return True
        self.waiting.setdefault(one, max(self.end[needs], self.free[s]))
        return False

    def ask_of(self, one: Pass) -> None:
        """Ask for the message that a pass has computed, where receivers do not wait."""
        last = len(self.problem.place) - 1
        receiver = None
        if one.kind == "F" and one.virtual < last:
            receiver = one._replace(virtual=one.virtual + 1)
        elif one.kind in ("B", "D") and one.virtual > 0:
            receiver = one._replace(virtual=one.virtual - 1)
        if receiver and self.problem.message(receiver).lasts > 0:
            self.waiting[receiver] = self.end[one]

    def needs(self, one: Pass) -> Pass | None:
        """The pass that must be done before a pass; None for the first forward passes."""
        last = len(self.problem.place) - 1
        if one.kind == "W":
            return one._replace(kind="B")
        if one.kind == "F":
            return None if one.virtual == 0 else one._replace(virtual=one.virtual - 1)
        if one.virtual == last:
            return one._replace(kind="F")
        return one._replace(virtual=one.virtual + 1)

    def is_local(self, one: Pass) -> bool:
        """Whether a pass needs a result of its own stage, for which there is no message."""
        last = len(self.problem.place) - 1
        return one.kind == "W" or (one.kind in ("B", "D") and one.virtual == last)

    def can_begin(self, one: Pass) -> float:
        """When the message of a pass can begin, as far as ports are known."""
        ports = self.problem.message(one).ports
        return max([self.waiting[one], *(self.port_free.get(port, 0.0) for port, _ in ports)])

    def next_message(self) -> Pass:
        """The message that begins first, by the rules of one moment."""
        begins = {one: self.can_begin(one) for one in self.waiting}
        moment = min(begins.values())
        now = [one for one, begin in begins.items() if begin <= moment * (1 + TIE)]
        return min(now, key=lambda one: self.turn(one, moment))

    def turn(self, one: Pass, moment: float) -> tuple[object, ...]:
        """Messages of one moment begin in the order of these keys."""
        asked = self.waiting[one]
        hop = one.virtual - 1 if one.kind == "F" else one.virtual
        key = (one.micro, one.kind != "F", hop)
        if asked * (1 + TIE) < moment:
            return (0, asked, *key)
        return (1, 0.0, *key)

    def send(self, one: Pass) -> None:
        """Send the message of a pass."""
        message: Message = self.problem.message(one)
        begin = self.can_begin(one)
        del self.waiting[one]
        for port, share in message.ports:
            self.port_free[port] = begin + share * message.seconds
        self.sent[one] = begin
        self.arrived[one] = begin + message.lasts

    def circle(self) -> str:
        """The passes that wait for each other, as text."""
        heads = [p[d] if d < len(p) else None for d, p in zip(self.done, self.order, strict=True)]
        stage = next(s for s, head in enumerate(heads) if head is not None)
        links: list[tuple[int, str]] = []
        while stage not in [s for s, _ in links]:
            head = heads[stage]
            assert head is not None, "a stage that is done waits for nothing"
            needed = self.needs(head)
            assert needed is not None, "a pass that needs nothing can be done"
            links.append((stage, f"{name(head)} needs {name(needed)}"))
            stage = self.problem.place[needed.virtual]
            if needed != heads[stage]:
                links[-1] = (links[-1][0], f"{links[-1][1]}, which is behind")
        first = [s for s, _ in links].index(stage)
        texts = [text for _, text in links[first:]]
        head = heads[stage]
        assert head is not None, "the circle begins with this pass"
        return " ".join([*texts, name(head)])


def peak_bytes(problem: PassProblem, passes: Sequence[Pass]) -> float:
    """The most bytes that a stage keeps at the same time under an order of its passes."""
    kept = peak = 0.0
    for kind, v, m in passes:
        if kind == "F":
            kept += problem.bytes_before_backward(v, m)
        elif kind == "W":
            kept -= problem.bytes_before_weight(v, m)
        else:
            kept -= problem.bytes_before_backward(v, m)
            if kind == "B":
                kept += problem.bytes_before_weight(v, m)
        peak = max(peak, kept)
    return peak


def stages_have_room(problem: PassProblem, peaks: Sequence[float]) -> Iterator[str]:
    """A line for each stage that keeps more bytes than its room."""
    if problem.room is None:
        return
    for s, (peak, room) in enumerate(zip(peaks, problem.room, strict=True)):
        if peak > room * (1 + MEMORY_TOLERANCE):
            yield f"passes[{s}]: keeps {peak:.6g} bytes at the same time, expected {room:.6g}"

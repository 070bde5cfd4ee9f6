"""No certificate proves more than is true, and what a method proves is certified."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.formulations.joint.bound.driver import lower_bounds
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.certificate.chains import (
    Chains,
    Clock,
    Links,
    Lump,
    Uncovered,
    check_covered,
    homes_by_type,
)
from hetplan.formulations.joint.certificate.check import (
    FIRST,
    Damaged,
    Part,
    Rows,
    T,
    may_have_plans,
    node_rows,
    parts,
)
from hetplan.formulations.joint.certificate.document import Certificate, verify
from hetplan.formulations.joint.certificate.reading import Instance
from hetplan.formulations.joint.certificate.write import certify
from hetplan.formulations.joint.data import JointData
from hetplan.instances.library import find, load_from_library
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run
from joint.enumeration import home_nodes, random_data, random_plan
from joint.test_bound import with_slower_links

ROOT = Path(__file__).resolve().parents[2]
ALLOWANCE = Fraction(1, 10**9)  # replays are computed in floating point
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(5, 100))]


def plans_of(rng: Random, data: JointData, count: int) -> Iterator[tuple[Plan, Fraction]]:
    """Random plans of the instance, with a little more than the seconds of their replays."""
    replayer = ChainReplayer.of(data)
    for _ in range(count):
        plan = random_plan(rng, data)
        if plan is not None:
            yield plan, Fraction(replayer.seconds(plan)) * (1 + ALLOWANCE)


def part_of(plan: Plan, data: JointData, instance: Instance) -> Part:
    """The part that the plan belongs to."""
    alone = home_nodes(plan)
    homes = tuple(
        sum(
            instance.types[alike.type] == data.nodes[n].device
            and alike.devices == data.nodes[n].devices
            for n in alone
        )
        for alike in instance.classes
    )
    chunks = any(
        len(replica.stages) > 1 and len(replica.stages[0].layers) > 1 for replica in plan.replicas
    )
    return Part(homes, len(plan.replicas) > 1, chunks)


class Held:
    """Who holds and computes the layers of a plan.

    holders[l]: nodes that hold a layer. shares[l][n]: share of its samples that a node computes.
    """

    def __init__(self, plan: Plan, data: JointData, instance: Instance) -> None:
        self.data, self.instance = data, instance
        L, N = len(data.layers), len(data.nodes)
        self.holders: list[set[int]] = [set() for _ in range(L)]
        self.types: list[set[int]] = [set() for _ in range(L)]
        self.shares = [[Fraction(0)] * N for _ in range(L)]
        costs = ChainReplayer.of(data).costs(plan.recomputation)
        for replica in plan.replicas:
            for stage in replica.stages:
                for batch in replica.micro_batches:
                    rows = costs.rows(stage, batch.samples)
                    for group, samples in zip(stage.devices, rows, strict=True):
                        node = plan.devices[group[0]].node
                        share = Fraction(samples * batch.count, data.global_batch)
                        for first, last in stage.layers:
                            for l in range(first, last):
                                self.shares[l][node] += share
                for device in stage.all_devices:
                    for first, last in stage.layers:
                        for l in range(first, last):
                            self.holders[l].add(plan.devices[device].node)
                            self.types[l].add(instance.types.index(plan.devices[device].type))

    def columns(self, part: Part, *, apart: bool) -> dict[Any, Fraction]:
        """The columns of the inequalities over nodes, but for T and FIRST."""
        instance, L = self.instance, len(self.holders)
        kinds = instance.kinds(part.homes, apart=apart)
        homes = {n for nodes in self.holders if len(nodes) == 1 for n in nodes}
        left = {
            n: (instance.types.index(node.device), node.devices, n in homes)
            for n, node in enumerate(self.data.nodes)
        }
        values: dict[Any, Fraction] = {}
        for k, kind in enumerate(kinds):
            alike = (kind.type, kind.devices, kind.is_home)
            members = [n for n, known in left.items() if known == alike][: kind.nodes]
            assert len(members) == kind.nodes
            for n in members:
                del left[n]
                self.add_node(values, n, k)
        for l in range(L):
            shared = len(self.holders[l]) > 1
            values["shared", l] = Fraction(shared)
            for q in range(len(instance.types)):
                values["of_type", l, q] = Fraction(shared and q in self.types[l])
        return values

    def add_node(self, values: dict[Any, Fraction], n: int, k: int) -> None:
        """Add a node to the columns of its kind."""

        def add(column: Any, value: Fraction | bool) -> None:
            values[column] = values.get(column, Fraction(0)) + value

        before = Fraction(0)
        for l, nodes in enumerate(self.holders):
            share = self.shares[l][n]
            add(("computes", l, k), share)
            add(("alone", l, k), nodes == {n})
            add(("together", l, k), n in nodes and len(nodes) > 1)
            if l:
                add(("enters", l, k), max(Fraction(0), share - before))
                add(("returns", l, k), max(Fraction(0), before - share))
            before = share
        tied = False
        for e in self.instance.tied_layers:
            first, other = self.holders[0] == {n}, self.holders[e] == {n}
            joined = n in self.holders[0] and not first
            tied = tied or (first and not other) or (other and not first and not joined)
        add(("tied", k), tied)


def broken(plan: Plan, data: JointData, instance: Instance, seconds: Fraction) -> list[str]:
    """Inequalities over nodes that the plan breaks if it takes so many seconds."""
    part, held, wrong = part_of(plan, data, instance), Held(plan, data, instance), []
    for homes, apart in ((part.homes, True), (part.homes, False)):
        rows = Rows()
        node_rows(instance, part, instance.kinds(homes, apart=apart), rows)
        values = held.columns(part, apart=apart)
        values[T], values[FIRST] = seconds, Fraction(0)
        for terms, _ in rows.rows["first"]:
            passes = -sum(c * values.get(x, 0) for x, c in terms.items() if x != FIRST)
            values[FIRST] = max(values[FIRST], passes / terms[FIRST])
        for column, most in rows.upper.items():
            if not 0 <= values.get(column, 0) <= most:
                wrong.append(f"{column}: {values.get(column)} of {most}")
        for name, of_name in rows.rows.items():
            for terms, right in of_name:
                left = sum(c * values.get(column, 0) for column, c in terms.items())
                if left < right or (name in rows.equations and left > right):
                    wrong.append(f"{name}, apart {apart}: {float(left)} of {right}")
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_keeps_the_inequalities_over_nodes(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng)
    while len(data.nodes) == 1:
        data = random_data(rng)
    # with slow cards the seconds are those of messages, with slow links those of joins in a node
    network, inside = (300.0, 3.0) if seed % 2 else (3.0, 300.0)
    for instance_data in (data, with_slower_links(data, network, inside)):
        instance = Instance(instance_data.model_dump(mode="json"))
        for plan, seconds in plans_of(rng, instance_data, 12):
            part = part_of(plan, instance_data, instance)
            assert may_have_plans(instance, part), plan.model_dump_json()
            assert part in set(parts(instance, general=False))
            assert may_have_plans(instance, part._replace(homes=None))
            assert broken(plan, instance_data, instance, seconds) == []


def refuted_chains(
    rng: Random, plan: Plan, data: JointData, links: Links, seconds: Fraction
) -> list[str]:
    """What (1) to (3) say wrongly of the plan's replicas, at random prices and fees."""
    instance, wrong = links.instance, []
    part = part_of(plan, data, instance)
    prices = [Fraction(rng.uniform(0.2, 2.0)) for _ in instance.types]
    homes = homes_by_type(instance, part.homes)
    for replica in plan.replicas:
        b, g = max(batch.samples for batch in replica.micro_batches), replica.samples
        price = sum(
            (prices[instance.types.index(data.devices[device][0])]
            for stage in replica.stages for device in stage.all_devices), Fraction(0),
        )  # fmt: skip
        around = rng.randint(1, b), b + rng.randint(0, 2), rng.randint(1, g), g + rng.randint(0, 3)
        for bounds, exact in (((b, b, g, g), True), ((b, b, g, g), False), (around, False)):
            scale = float(seconds / price)
            fees = [0.0, *(scale * rng.choice((0.1, 0.3, 1.0, 3.0, 100.0)) for _ in range(3))]
            lump = Lump(*bounds, exact, [fees, fees])
            of_lump = Chains(Clock(links, seconds), homes, prices, lump, several=part.several)
            of_lump.worth = price
            cases = of_lump.cases()
            if all(of_lump.exceeds(changes, limit, fees) for changes, limit in cases):
                wrong.append(f"{lump}")
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_no_chain_is_refuted_at_its_own_seconds(seed: int) -> None:
    rng = Random(1000 + seed)
    data = random_data(rng, devices=5, layers=5)
    links = Links(Instance(data.model_dump(mode="json")))
    checked = 0
    for plan, seconds in plans_of(rng, data, 60):
        if checked < 4 and not part_of(plan, data, links.instance).chunks:
            assert refuted_chains(rng, plan, data, links, seconds) == [], plan.model_dump_json()
            checked += 1
    assert checked


def certificate_of(data: JointData, goal: float | None) -> dict[str, Any]:
    """A certificate, as it stands in its file."""
    return certify(data, "it", goal, Run(Options(threads=1))).model_dump(mode="json")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_asked_beyond_the_truth_is_not_proven(seed: int) -> None:
    """Half as much again as the fastest of many plans takes."""
    rng = Random(2000 + seed)
    data = random_data(rng, devices=4, layers=4, batch=4)
    fastest = min(seconds for _, seconds in plans_of(rng, data, 300))
    proven = verify(data, certificate_of(data, 1.5 * float(fastest)), "it").proven
    assert 0 < proven <= fastest


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bound_is_certified(seed: int) -> None:
    """That of nodes up to a share of 1e-6, and mostly more."""
    rng = Random(3000 + seed)
    data = random_data(rng, devices=4, layers=4, batch=6)
    bounds = lower_bounds(Relaxation(data), Run(Options(threads=1), budget=1.0))
    certificate = certificate_of(data, bounds.nodes)
    certified = verify(data, certificate, "it")
    assert certified.holds
    assert bounds.nodes * (1 - 1e-6) <= certified.proven
    assert certified.claimed == bounds.nodes
    higher = {**certificate, "bound": math.nextafter(certified.proven, math.inf)}
    assert not verify(data, higher, "it").holds


@pytest.mark.parametrize(
    ("name", "least"), [("tiny-joint-gpt2-3", 0.0027), ("tiny-joint-llama-2", 0.0)]
)
def test_a_packaged_instance(name: str, least: float) -> None:
    """Its chains prove more than its nodes do, which prove 1.54 ms."""
    data = load_from_library(name).data
    goal = lower_bounds(Relaxation(data), Run(Options(threads=1), budget=2.0)).every
    certified = verify(data, certificate_of(data, goal), "it")
    assert certified.holds
    assert least < certified.proven <= goal


@cache
def to_change() -> list[tuple[JointData, float, dict[str, Any]]]:
    """(instance, seconds of a plan, certificate) of some instances; their certificates have all
    kinds of proofs."""
    made = []
    for name in ("tiny-joint-gpt2-3", "tiny-joint-llama-1"):
        entry = find(name)
        best = entry.best_known() if entry else None
        assert entry is not None
        assert best is not None
        data = entry.load().data
        goal = lower_bounds(Relaxation(data), Run(Options(threads=1), budget=1.0)).every
        made.append((data, best.objective, certificate_of(data, goal)))
    for seed in (19, 36):
        data = random_data(Random(seed), devices=3, layers=3, batch=3)
        fastest = float(min(seconds for _, seconds in plans_of(Random(0), data, 200)))
        made.append((data, fastest, certificate_of(data, 0.9 * fastest)))
    text = str([certificate for _, _, certificate in made])
    assert all(f"'{word}'" in text for word in ("branch", "multipliers", "lumps"))
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    if path:
        yield path
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, each in inside:
        yield from places(each, (*path, key))


def change(rng: Random, certificate: dict[str, Any]) -> dict[str, Any]:
    """The certificate with one to four values changed, left out, doubled or exchanged, and mostly a
    higher bound."""
    changed = copy.deepcopy(certificate)
    for _ in range(rng.choice((1, 1, 2, 4))):
        *path, key = rng.choice(list(places(changed)))
        at = changed
        for step in path:
            at = at[step]
        value: Any = at[key]
        if isinstance(value, bool):
            at[key] = not value
        elif isinstance(value, int | float):
            near: list[Any] = [0, -value, 2 * value, value / 2, value + 1, value - 1, 1e6 * value]
            at[key] = rng.choice([*near, value * rng.uniform(0.9, 1.1), 1e300, rng.random()])
        elif isinstance(value, list) and value:
            chosen = rng.randrange(len(value))
            action = rng.randrange(3)
            if action == 0:
                del value[chosen]
            elif action == 1:
                value.append(copy.deepcopy(value[chosen]))
            else:
                rng.shuffle(value)
        elif isinstance(value, dict) and value:
            one, other = rng.choice(list(value)), rng.choice(list(value))
            value[one], value[other] = value[other], value[one]
        else:
            del at[key]
    if "bound" in changed and isinstance(changed["bound"], int | float) and rng.random() < 0.8:
        changed["bound"] *= rng.choice((1.0, 1.001, 1.1, 2.0))
    return changed


# 40 changes a seed: 200 by default, and 5,000 in all.
@pytest.mark.parametrize("seed", range(125))
def test_no_changed_certificate_proves_what_is_not_true(seed: int) -> None:
    rng, accepted = Random(seed), 0
    for _ in range(40):
        data, fastest, certificate = rng.choice(to_change())
        changed = change(rng, certificate)
        try:
            certified = verify(data, changed, "changed")
        except InputError:
            continue
        assert certified.proven <= fastest * (1 + 1e-9)
        accepted += certified.holds
    assert accepted  # some changes do no harm


def test_only_columns_of_one_node_are_0_or_1() -> None:
    """Of two nodes together both may hold a layer."""
    data, _, certificate = next(each for each in to_change() if "'branch'" in str(each[2]))
    rows = Rows()
    rows.columns("together", iter([(0, 0)]), 2)
    rows.columns("computes", iter([(0, 0)]))
    leaf: dict[str, Any] = {"multipliers": {}}
    for name in ("together", "computes", "alone"):
        with pytest.raises(Damaged, match="no column that is 0 or 1"):
            rows.seconds({"branch": (name, 0, 0), "zero": leaf, "one": leaf}, {}, "part")
    assert verify(data, certificate, "it").holds


def test_of_two_pieces_the_lesser_counts() -> None:
    """T >= 1 + x, and x is 0 or 1."""
    rows, column = Rows(), ("alone", 0, 0)
    rows.columns("alone", iter([(0, 0)]))
    rows.at_least("time", {T: 1, column: -1}, 1)
    leaf = {"multipliers": {"time": [1.0]}}
    tree = {"branch": column, "zero": leaf, "one": leaf}
    assert rows.seconds(leaf, {column: 1}, "part") == 2
    assert rows.seconds(tree, {}, "part") == 1


def test_columns_are_as_large_as_they_may_be_where_that_is_worse() -> None:
    """T >= 5 - x, and x is at most 3."""
    rows = Rows()
    rows.columns("computes", iter([(0, 0)]), 3)
    rows.at_least("time", {T: 1, ("computes", 0, 0): 1}, 5)
    rows.equal("computed", {("computes", 0, 0): 1}, 1)
    assert rows.seconds({"multipliers": {"time": [1.0]}}, {}, "part") == 2
    # the equation x = 1 may be taken away
    both = {"time": [1.0], "computed": [-1.0]}
    assert rows.seconds({"multipliers": both}, {}, "part") == 4
    with pytest.raises(Damaged, match="a negative multiplier of an inequality"):
        rows.seconds({"multipliers": {"time": [-1.0]}}, {}, "part")


def chains_of(lump: Lump, *, several: bool) -> Chains:
    """A lump of replicas of a small instance with nine samples."""
    data = random_data(Random(1), devices=3, layers=3, batch=12)
    data = data.model_copy(update={"global_batch": 9})
    links = Links(Instance(data.model_dump(mode="json")))
    homes, prices = homes_by_type(links.instance, None), [Fraction(1)] * len(links.instance.types)
    return Chains(Clock(links, Fraction(10)), homes, prices, lump, several=several)


def test_gpipes_way_is_that_of_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is smaller, GPipe may be faster than what other schedules are refuted with."""
    exact = chains_of(Lump(8, 8, 9, 9, True, []), several=False)
    assert (exact.all, exact.behind(1), exact.behind(2), exact.last) == (9, 1, 0, 1)
    most = 2**60
    others, gpipe = (
        exact.least_way(0, most, 0, Fraction(0), gpipe=is_gpipe) for is_gpipe in (False, True)
    )
    assert gpipe < others
    whole = chains_of(Lump(8, 8, 9, 9, False, []), several=False)
    for chains, expected in ((exact, False), (whole, True)):
        monkeypatch.setattr(chains, "least_way", lambda *_, gpipe: 10 if gpipe else 20)
        assert chains.exceeds(0, 15, [0.0]) is expected
        assert chains.exceeds(0, 5, [0.0])


def test_of_a_lump_the_fewest_samples_count() -> None:
    """7 samples are three pairs or two triples; what is left of them does not count."""
    chains = chains_of(Lump(2, 3, 7, 8, False, []), several=True)
    assert (chains.all, chains.but_one, chains.behind(2), chains.last) == (6, 3, 0, 2)
    assert chains.worth == Fraction(8 * sum(chains.instance.counts), 9)


def test_lumps_must_have_all_replicas() -> None:
    one, six = Lump(1, 6, 6, 6, False, []), 6
    check_covered([one], six, several=False)
    check_covered([Lump(1, 2, 6, 6, False, []), one._replace(least=3)], six, several=False)
    check_covered([Lump(1, 5, 1, 3, False, []), Lump(1, 5, 4, 5, False, [])], six, several=True)
    for lumps, several in (
        ([], False),
        ([one._replace(least=2)], False),
        ([one._replace(most=5)], False),
        ([one._replace(low=5, high=5)], False),
        ([one._replace(low=0)], False),
        ([one, Lump(4, 5, 1, 3, False, [])], False),
        ([one._replace(exact=True)], False),
        ([Lump(1, 5, 1, 3, False, [])], True),
        ([Lump(1, 5, 1, 3, False, []), Lump(1, 5, 5, 5, False, [])], True),
        ([Lump(1, 5, 2, 5, False, [])], True),
        ([Lump(1, 3, 1, 5, False, []), Lump(5, 5, 1, 5, False, [])], True),
    ):
        with pytest.raises(Uncovered):
            check_covered(lumps, six, several=several)


def test_a_check_needs_neither_numpy_nor_a_solver(tmp_path: Path) -> None:
    """It runs where no package is installed."""
    data, _, certificate = to_change()[0]
    (tmp_path / "data.json").write_text(data.model_dump_json(), encoding="utf-8")
    (tmp_path / "certificate.json").write_text(
        Certificate.model_validate(certificate).model_dump_json(), encoding="utf-8"
    )
    program = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hetplan.formulations.joint.certificate.check import check
data, certificate = (json.load(open(name, encoding="utf-8")) for name in sys.argv[2:])
print(float(check(data, certificate)))
"""
    files = [str(tmp_path / name) for name in ("data.json", "certificate.json")]
    arguments = [sys.executable, "-S", "-c", program, str(ROOT / "src"), *files]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(verify(data, certificate, "it").proven)

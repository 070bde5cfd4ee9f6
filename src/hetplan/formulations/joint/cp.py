"""Problem `joint` for CP-SAT: passes and messages are intervals, whose order is a decision.

Sets    s in 0..D-1 places for stages, those of all replicas one behind the other; c chunks;
        m in 0..G-1 micro-batches; side 0 forward, 1 backward; q groups of devices; r runs: a group
        with the layers [first_r, last_r) that it computes, run 0 none (prices.py).
Data    ticks of passes, messages, joins and updates, bytes (prices.py); G samples, L layers.
Vars    run_sc;  group_s;  opens_s, closes_s in {0,1}: stage s is its replica's first, last one;
        samples_s, size_s, count_s of the replica's micro-batches, size_sm of micro-batch m or 0;
        schedule, chunks, zero, mode of the plan;  begin, end of every pass, an optional interval.
Min     T  s.t.
(1)  group_s, first_sc, last_sc are those of run_sc; stages in use come first `know_what_runs_mean`
(2)  no device is in two groups                                               `use_devices_once`
(3)  a replica's runs follow each other from layer 0 to L, chunk by chunk     `hold_all_layers`
(4)  micro-batches add up to G; sizes by a table                              `share_the_samples`
(5)  schedule, chunks, steps, ZeRO level and replicas go together             `keep_the_rules`
(6)  a pass takes the ticks of its run, size and mode; forward before backward    `take_passes`
(7)  a message goes from the pass that makes it to the pass that needs it, and its receiver waits
     for it: passes and messages of a stage take turns       no overlap       `send_messages`
(8)  turns of a stage are those of its schedule, by a table                   `keep_the_order`
(9)  T is no less than the last backward pass, joins and update of any stage  `join_and_update`
(10) micro-batches between their passes fit beside the states     cumulative  `fit_in_memory`
(11) of two alike devices of a node the first has the earlier place  symmetry `order_alike_devices`
(12) the numbers of the replicas' first groups ascend              symmetry  `order_the_replicas`
(13) a stage is not done before its passes; T >= computing alone    implied  `outlast_the_passes`

What the model covers. Its decisions are all plans of the space whose row groups share a micro-batch
evenly: any replicas, row groups, tensor ranks, chunks, ZeRO levels, modes and named schedules. It
prices no plan higher than the replay does, and exactly a single replica of at most two stages of
one device and one chunk each. Elsewhere it leaves out what would cost more: in (7) messages do not
wait for a port that messages of another stage hold; (9) counts the joins of one replica and of two,
of several chunks those of the first, and of more replicas none; (10) leaves out buffers. So its
optimum is a lower bound, and a plan is optimal where its replay attains it.

`solve` has the evaluator price CP-SAT's answer and all plans of its shape, excludes this shape, and
asks again for a plan that may be faster than the best one so far, until there is none. Then the
best plan is optimal. Stopped before, the last answer's bound holds. Instances beyond `Parameters`
are not modelled; for them, too, the bound by computing alone is told.

Without (8), `build(..., free=True)`, a stage takes passes of different chunks and sides in any
order. That optimum is a lower bound for all schedules in which every chunk takes its micro-batches
in order, named or not; no plan file may say the order that attains it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from ortools.sat.python.cp_model import IntVar

from hetplan.formulations.joint.cp_plans import Best, of_one_shape, on_one_device, read
from hetplan.formulations.joint.cp_variables import INTERLEAVED, Variables
from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.prices import HALVES, STEPS, WHOLE, Floats, Prices, computing_alone
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import label, minimise
from hetplan.solvers.model import Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, Stopped, stop_reason

StagePass = tuple[int, int, int]  # (side, chunk, micro-batch)


@dataclass(frozen=True)
class Parameters:
    """Limits of small instances."""

    devices: int = 4  # most devices
    passes: int = 600  # most passes of all stages, chunks and micro-batches
    prices: int = 100_000  # most entries of the table of passes


def know_what_runs_mean(v: Variables) -> None:  # (1)
    """The group and the layers of a stage are those of its runs. Stages in use come first."""
    cp, runs = v.model.cp, v.prices.runs
    cp.add(v.used[0] == 1)
    for c in v.chunks_of:
        cp.add(v.chunks > c).only_enforce_if(v.active[c])
        cp.add(v.chunks <= c).only_enforce_if(~v.active[c])
    for s in v.stages:
        cp.add(v.group[s] > 0).only_enforce_if(v.used[s])
        cp.add(v.group[s] == 0).only_enforce_if(~v.used[s])
        if s > 0:
            cp.add_implication(v.used[s], v.used[s - 1])
        for c in v.chunks_of:
            group = cp.new_int_var(0, len(v.prices.groups) - 1, f"group_{s}_{c}")
            cp.add_element(v.run[s, c], [run.group for run in runs], group)
            cp.add_element(v.run[s, c], [run.first for run in runs], v.first[s, c])
            cp.add_element(v.run[s, c], [run.last for run in runs], v.last[s, c])
            cp.add(group == v.group[s]).only_enforce_if(v.active[c])
            cp.add(group == 0).only_enforce_if(~v.active[c])
            if c > 0:
                cp.add(v.held[s, c] == v.run[s, c])
        # The only stage of a replica holds all layers at once, in whatever chunks it computes them.
        alone = v.equals(v.depth[s], 1, f"alone_{s}")
        cp.add(v.held[s, 0] == v.run[s, 0]).only_enforce_if(~alone)
        whole = [0] * len(v.prices.groups)
        for r, run in enumerate(runs):
            if (run.first, run.last) == (0, v.L):
                whole[run.group] = r
        all_layers = v.look_up(whole, [len(whole)], [v.group[s]], f"whole_{s}")
        cp.add(v.held[s, 0] == all_layers).only_enforce_if(alone)


def use_devices_once(v: Variables) -> None:  # (2)
    """No device is in the groups of two stages."""
    cp, groups = v.model.cp, v.prices.groups
    for device in range(v.D):
        uses = [cp.new_bool_var(f"uses_{device}_{s}") for s in v.stages]
        for s in v.stages:
            cp.add_element(v.group[s], [int(device in q.devices) for q in groups], uses[s])
        cp.add_at_most_one(uses)


def hold_all_layers(v: Variables) -> None:  # (3)
    """A replica's runs follow each other from the first layer to the last, chunk by chunk. `before`
    and `after` count the other stages of the replica; its ends know each other's groups."""
    cp = v.model.cp
    cp.add(v.opens[0] == 1)
    for s in v.stages:
        following = v.opens[s + 1] if s + 1 < v.D else 0
        continues = v.used[s + 1] - following if s + 1 < v.D else 0
        cp.add(v.closes[s] == v.used[s] - continues)
        cp.add_implication(v.opens[s], v.used[s])
        cp.add(v.depth[s] == v.before[s] + v.after[s] + 1).only_enforce_if(v.used[s])
        cp.add(v.depth[s] == 0).only_enforce_if(~v.used[s])
        cp.add(v.before[s] == 0).only_enforce_if(v.opens[s])
        cp.add(v.head_group[s] == v.group[s]).only_enforce_if(v.opens[s])
        cp.add(v.after[s] == 0).only_enforce_if(v.closes[s])
        cp.add(v.tail_group[s] == v.group[s]).only_enforce_if(v.closes[s])
        for c in v.chunks_of:
            cp.add(v.tail[s, c] == v.last[s, c]).only_enforce_if(v.closes[s])
            begins = 0 if c == 0 else v.tail[s, c - 1]
            cp.add(v.first[s, c] == begins).only_enforce_if(v.opens[s], v.active[c])
            last_chunk = v.equals(v.chunks, c + 1, f"last_chunk_{s}_{c}")
            cp.add(v.last[s, c] == v.L).only_enforce_if(v.closes[s], last_chunk)
        for fixed in (v.before[s], v.after[s], v.head_group[s], v.tail_group[s], *v.tail[s]):
            cp.add(fixed == 0).only_enforce_if(~v.used[s])
        if s == 0:
            continue
        inside = [v.used[s], ~v.opens[s]]  # the stage before is of the same replica
        cp.add(v.before[s] == v.before[s - 1] + 1).only_enforce_if(inside)
        cp.add(v.after[s - 1] == v.after[s] + 1).only_enforce_if(inside)
        cp.add(v.head_group[s] == v.head_group[s - 1]).only_enforce_if(inside)
        cp.add(v.tail_group[s - 1] == v.tail_group[s]).only_enforce_if(inside)
        for c in v.chunks_of:
            cp.add(v.tail[s - 1, c] == v.tail[s, c]).only_enforce_if(inside)
            cp.add(v.first[s, c] == v.last[s - 1, c]).only_enforce_if(*inside, v.active[c])


def share_the_samples(v: Variables) -> None:  # (4)
    """The samples of all replicas add up to G. A replica's micro-batches are equal but for the last
    one, which may be smaller, and all its stages take them."""
    cp = v.model.cp
    ways = [(0, 0, 0, *(0,) * v.G)]
    for samples in range(1, v.G + 1):
        for size in range(1, samples + 1):
            sizes = [min(size, samples - done) for done in range(0, samples, size)]
            ways.append((samples, size, len(sizes), *sizes, *(0,) * (v.G - len(sizes))))
    own = []
    for s in v.stages:
        columns = [v.samples[s], v.size[s], v.count[s], *v.size_of[s]]
        cp.add_allowed_assignments(columns, ways)
        cp.add(v.samples[s] > 0).only_enforce_if(v.used[s])
        cp.add(v.samples[s] == 0).only_enforce_if(~v.used[s])
        own.append(cp.new_int_var(0, v.G, f"own_{s}"))  # counted on the replica's first stage
        cp.add(own[s] == v.samples[s]).only_enforce_if(v.opens[s])
        cp.add(own[s] == 0).only_enforce_if(~v.opens[s])
        if s > 0:
            for column in (v.samples, v.size):
                inside = [v.used[s], ~v.opens[s]]
                cp.add(column[s] == column[s - 1]).only_enforce_if(inside)
    cp.add(sum(own) == v.G)


def keep_the_rules(v: Variables) -> None:  # (5)
    """Several chunks are interleaved; interleaved micro-batches make whole rounds of the stages.
    ZeRO 2 and 3 are for equally many micro-batches; stages of pipelines have no more than the
    framework's highest level."""
    cp = v.model.cp
    cp.add(sum(v.opens) == v.replicas)
    interleaved = v.equals(v.schedule, INTERLEAVED, "interleaved")
    cp.add(v.chunks == 1).only_enforce_if(~interleaved)
    rounds = [(0, 0), *product(range(1, v.D + 1), range(1, v.G + 1))]
    for s in v.stages:
        allowed = [
            (schedule, depth, count)
            for schedule, (depth, count) in product(range(len(WHOLE_SCHEDULES)), rounds)
            if schedule != INTERLEAVED or depth == 0 or count % depth == 0
        ]
        cp.add_allowed_assignments([v.schedule, v.depth[s], v.count[s]], allowed)
    cp.add(sum(v.used) + v.chunks == v.replicas + 1).only_enforce_if(v.in_steps)
    cp.add(sum(v.used) + v.chunks > v.replicas + 1).only_enforce_if(~v.in_steps)
    data = v.prices.data
    cp.add_allowed_assignments([v.zero], [(zero,) for zero in data.zero_levels])
    highest = max(data.framework.pipeline_levels)
    cp.add(v.zero <= highest).only_enforce_if(~v.in_steps)
    divided = v.at_least(v.zero, 2, "divided")
    for s in v.stages:
        cp.add(v.count[s] == v.count[0]).only_enforce_if(divided, v.used[s])


def take_passes(v: Variables) -> None:  # (6)
    """A pass takes the ticks of its run, samples and mode. Passes of a stage's chunk take the
    micro-batches in order; a backward pass comes behind its forward pass."""
    cp, table = v.model.cp, v.prices.passes
    for s, c, m in product(v.stages, v.chunks_of, range(v.G)):
        cp.add(v.size_of[s, m] > 0).only_enforce_if(v.present[s, c, m])
        cp.add(v.size_of[s, m] == 0).only_enforce_if(~v.present[s, c, m], v.active[c])
        cp.add_implication(v.present[s, c, m], v.active[c])
    ticks = [v.model.ticks(table[0, 0]), v.model.ticks(table[1])]
    for side, s, c, m in v.passes():
        place, shape = [v.run[s, c], v.size_of[s, m]], table.shape[2:]
        if side == 1:
            place, shape = [v.mode, *place], table.shape[1:]
        name = f"pass_{side}_{s}_{c}_{m}"
        seconds = v.look_up(ticks[side], shape, place, name)
        cp.add(v.seconds[side, s, c, m] == seconds)
        v.intervals[s].append(
            cp.new_optional_interval_var(
                v.begin[side, s, c, m],
                v.seconds[side, s, c, m],
                v.end[side, s, c, m],
                v.present[s, c, m],
                name,
            )
        )
        there = v.present[s, c, m]
        if m > 0:
            cp.add(v.end[side, s, c, m - 1] <= v.begin[side, s, c, m]).only_enforce_if(there)
        if side == 1:
            cp.add(v.end[0, s, c, m] <= v.begin[1, s, c, m]).only_enforce_if(there)
            cp.add(v.done[s] >= v.end[1, s, c, m]).only_enforce_if(there)


def send_messages(v: Variables) -> None:  # (7)
    """Every pass but a replica's first waits for a message of the stage before (behind, for
    gradients) or, where its chunk begins (ends) there, of the replica's other end. The message asks
    when it is made and its receiver does nothing else."""
    cp = v.model.cp
    for side, s, c in product(range(2), v.stages, v.chunks_of):
        edge = (v.opens, v.closes)[side][s]  # whether the stage is at the replica's near end
        opposite = (v.closes, v.opens)[side][s]
        near, further, chunk = (s - 1, s + 1, c - 1) if side == 0 else (s + 1, s - 1, c + 1)
        needs = needs_message(v, side, s, c)
        hop = hop_kind(v, side, s, c, needs)
        for m in range(v.G):
            there, name = v.present[s, c, m], f"{side}_{s}_{c}_{m}"
            far = v.far_end[side, s, c, m]
            cp.add(far >= v.end[side, s, c, m]).only_enforce_if(opposite, there)
            if 0 <= further < v.D:
                passed_on = v.far_end[side, further, c, m]
                cp.add(far >= passed_on).only_enforce_if(~opposite, there)
            exists = v.both(f"sent_{name}", there, needs)
            seconds = v.look_up(v.hop_ticks, v.hop_shape, [hop, v.size_of[s, m]], f"hop_{name}")
            start, arrival = v.model.time(f"start_{name}"), v.model.time(f"arrival_{name}")
            if 0 <= near < v.D:
                made = v.end[side, near, c, m]
                cp.add(start >= made).only_enforce_if(~edge, exists)
            if 0 <= chunk < v.C:
                made = v.far_end[side, s, chunk, m]
                cp.add(start >= made).only_enforce_if(edge, exists)
            cp.add(arrival <= v.begin[side, s, c, m]).only_enforce_if(exists)
            v.intervals[s].append(
                cp.new_optional_interval_var(start, seconds, arrival, exists, f"message_{name}")
            )
    for s in v.stages:
        cp.add_no_overlap(v.intervals[s])


def needs_message(v: Variables, side: int, s: int, c: int) -> IntVar:
    """Whether the passes of a chunk wait for messages: all but those of a replica's first chunk on
    its first stage, and backward those of its last chunk on its last stage."""
    edge = (v.opens, v.closes)[side][s]
    far_chunk = c == 0 if side == 0 else c == v.C - 1
    name = f"needs_{side}_{s}_{c}"
    if far_chunk:
        return v.both(name, v.active[c], v.used[s], ~edge)
    if side == 0:
        return v.both(name, v.active[c], v.used[s])
    outermost = v.both(f"outermost_{s}_{c}", edge, ~v.active[c + 1])
    return v.both(name, v.active[c], v.used[s], ~outermost)


def hop_kind(v: Variables, side: int, s: int, c: int, needs: IntVar) -> IntVar:
    """The kind of a message (`Variables.hops`): between which groups, and before which layer."""
    cp = v.model.cp
    edge = (v.opens, v.closes)[side][s]
    near, chunk = (s - 1, c - 1) if side == 0 else (s + 1, c + 1)
    sender = cp.new_int_var(0, len(v.prices.groups) - 1, f"sender_{side}_{s}_{c}")
    cp.add(sender == 0).only_enforce_if(~needs)
    if 0 <= near < v.D:
        cp.add(sender == v.group[near]).only_enforce_if(~edge, needs)
    if 0 <= chunk < v.C:
        far = (v.tail_group, v.head_group)[side][s]
        cp.add(sender == far).only_enforce_if(edge, needs)
    layer = (v.first, v.last)[side][s, c]
    hop = cp.new_int_var(0, v.hop_shape[0] - 1, f"hop_{side}_{s}_{c}")
    cp.add_allowed_assignments([sender, v.group[s], layer, hop], v.hops)
    return hop


def turns(schedule: str, depth: int, before: int, count: int, chunks: int) -> list[StagePass]:
    """The passes of a stage in their order."""
    forward = [(c, m) for c in range(chunks) for m in range(count)]
    if schedule == "interleaved-1f1b":
        forward.sort(key=lambda each: (each[1] // depth, each[0], each[1]))
    behind = depth - 1 - before
    warm = {
        "gpipe": len(forward),
        "1f1b": behind,
        "interleaved-1f1b": 2 * behind + (chunks - 1) * depth,
    }[schedule]
    warm = min(warm, len(forward))
    backward = [(1, chunks - 1 - c, m) for c, m in forward]
    order: list[StagePass] = [(0, *each) for each in forward[:warm]]
    for i, each in enumerate(forward[warm:]):
        order += [(0, *each), backward[i]]
    return order + backward[len(forward) - warm :]


def keep_the_order(v: Variables) -> None:  # (8)
    """A stage takes its passes in the order of its schedule: a table has the turn of each pass."""
    cp, none = v.model.cp, 2 * v.C * v.G  # the turn of a pass that there is not
    keys = list(product(range(2), v.chunks_of, range(v.G)))
    rows = [(i, 0, 0, 0, c, *(none,) * len(keys)) for i, c in product(range(3), range(1, v.C + 1))]
    for (i, schedule), depth, count, chunks in product(
        enumerate(WHOLE_SCHEDULES), range(1, v.D + 1), range(1, v.G + 1), range(1, v.C + 1)
    ):
        if i != INTERLEAVED and chunks > 1:
            continue
        if i == INTERLEAVED and count % depth:
            continue
        for before in range(depth):
            order = turns(schedule, depth, before, count, chunks)
            turn_in = {each: k for k, each in enumerate(order)}
            own = (turn_in.get(key, none) for key in keys)
            rows.append((i, depth, before, count, chunks, *own))
    for s in v.stages:
        turn_of = {key: cp.new_int_var(0, none, f"turn_{s}_{key}") for key in keys}
        v.turn |= {(side, s, c, m): turn for (side, c, m), turn in turn_of.items()}
        columns = [v.schedule, v.depth[s], v.before[s], v.count[s], v.chunks, *turn_of.values()]
        cp.add_allowed_assignments(columns, rows)
        for (x, turn), (y, other) in combinations(turn_of.items(), 2):
            (side, *at), (opposite, *there) = x, y
            earlier = cp.new_bool_var(f"earlier_{s}_{x}_{y}")
            cp.add(turn < other).only_enforce_if(earlier)
            cp.add(turn >= other).only_enforce_if(~earlier)
            both = [v.present[s, *at], v.present[s, *there]]
            one, two = (side, s, *at), (opposite, s, *there)
            cp.add(v.end[one] <= v.begin[two]).only_enforce_if(earlier, *both)
            cp.add(v.end[two] <= v.begin[one]).only_enforce_if(~earlier, *both)


def join_and_update(v: Variables) -> None:  # (9)
    """Behind its last backward pass a stage joins its weights with whoever holds them, and updates
    its part. Counted are the row groups of a single replica's stages and its tied ends, and of two
    replicas the layers that two of their stages share."""
    cp, way = v.model.cp, way_to_join(v)
    rows = [len(group.rows) for group in v.prices.groups]
    row_groups = [v.look_up(rows, [len(rows)], [v.group[s]], f"rows_{s}") for s in v.stages]
    sharded = v.at_least(v.zero, 1, "sharded")
    single = v.equals(v.replicas, 1, "single")
    one_chunk = v.equals(v.chunks, 1, "one_chunk")
    joins, updates = v.prices.joins(tied=False), v.prices.updates
    own = np.stack([joins[:, :, q, q, first, last] for q, first, last in v.prices.runs], axis=-1)
    own_ticks = [v.model.ticks(own[i]) for i in range(2)]
    update_ticks = v.model.ticks(updates)
    update: dict[tuple[int, int], IntVar] = {}
    for s in v.stages:
        # row groups that divide the stage's states; with several replicas an upper bound
        cp.add(v.divide[s] == 1).only_enforce_if(~sharded)
        cp.add(v.divide[s] == 1).only_enforce_if(~v.used[s])
        alone, several = [sharded, single, v.used[s]], [sharded, ~single, v.used[s]]
        cp.add(v.divide[s] == row_groups[s]).only_enforce_if(alone)
        cp.add(v.divide[s] == sum(row_groups) - v.depth[s] + 1).only_enforce_if(several)
        for c in v.chunks_of:
            place = [one_chunk, v.held[s, c], v.divide[s]]
            update[s, c] = v.look_up(update_ticks, updates.shape, place, f"update_{s}_{c}")
            cp.add(v.total >= v.done[s] + update[s, c]).only_enforce_if(v.used[s])
            before, behind = (
                v.look_up(own_ticks[i], own.shape[1:], [way, v.held[s, c]], f"join_{i}_{s}_{c}")
                for i in range(2)
            )
            joined = v.done[s] + before + update[s, c] + behind
            cp.add(v.total >= joined).only_enforce_if(single, v.used[s])
    for s, t in combinations(v.stages, 2):
        shared = [v.equals(v.replicas, 2, f"pair_{s}_{t}"), *shares_layers(v, s, t)]
        join_two(v, joins, way, (s, t), shared, update)
        if s == 0 and v.prices.tied:
            ends = [single, v.used[t], v.closes[t]]
            join_two(v, v.prices.joins(tied=True), way, (s, t), ends, update, tied=True)


def way_to_join(v: Variables) -> IntVar:
    """The way in which weights are joined (prices.py), by ZeRO level and devices."""
    cp = v.model.cp
    sizes = [len(group.devices) for group in v.prices.groups]
    devices = [v.look_up(sizes, [len(sizes)], [v.group[s]], f"devices_{s}") for s in v.stages]
    plain = cp.new_bool_var("plain")  # every stage is one device
    cp.add(sum(devices) == sum(v.used)).only_enforce_if(plain)
    cp.add(sum(devices) > sum(v.used)).only_enforce_if(~plain)
    rows = []
    for zero, in_steps, is_plain in product(range(4), range(2), range(2)):
        if zero == 0:
            rows.append((zero, in_steps, is_plain, WHOLE))
        elif in_steps and (zero > 1 or is_plain):
            rows.append((zero, in_steps, is_plain, STEPS))
        else:
            rows.append((zero, in_steps, is_plain, HALVES))
    way = cp.new_int_var(0, 2, "way")
    cp.add_allowed_assignments([v.zero, v.in_steps, plain, way], rows)
    return way


def shares_layers(v: Variables, s: int, t: int) -> list[IntVar]:
    """Literals: stage s is in the first and stage t in the second replica, and both are in use."""
    cp = v.model.cp
    apart = cp.new_bool_var(f"apart_{s}_{t}")
    opened = sum(v.opens[s + 1 : t + 1])
    cp.add(opened >= 1).only_enforce_if(apart)
    cp.add(opened == 0).only_enforce_if(~apart)
    return [apart, v.used[t]]


def join_two(
    v: Variables,
    joins: Floats,
    way: IntVar,
    stages: tuple[int, int],
    conditions: Sequence[IntVar],
    update: dict[tuple[int, int], IntVar],
    *,
    tied: bool = False,
) -> None:
    """Under conditions, two stages join the layers that both hold, or the tied weights, when both
    are done, and update them. joins: seconds of the collectives, a table of the prices. update:
    ticks of (stage, chunk)."""
    cp, (s, t), name = v.model.cp, stages, f"{'tied' if tied else 'shared'}_{stages[0]}_{stages[1]}"
    begin, end = cp.new_int_var(0, v.L, f"begin_{name}"), cp.new_int_var(0, v.L, f"end_{name}")
    if tied:
        cp.add(begin == 0)
        cp.add(end == v.L)
    else:
        runs = v.prices.runs
        firsts, lasts = [run.first for run in runs], [run.last for run in runs]
        size = [len(runs)]
        cp.add_max_equality(
            begin, [v.look_up(firsts, size, [v.held[x, 0]], f"first_{name}_{x}") for x in stages]
        )
        cp.add_min_equality(
            end, [v.look_up(lasts, size, [v.held[x, 0]], f"last_{name}_{x}") for x in stages]
        )
    rows, seconds = [], [np.zeros(joins.shape[:2])]  # kind 0: no layers in common
    groups = v.prices.groups
    for q, p in product(range(len(groups)), repeat=2):
        distinct = q > 0 < p and not set(groups[q].devices) & set(groups[p].devices)
        for first, last in product(range(v.L + 1), repeat=2):
            kind = 0
            if distinct and first < last:
                kind = len(seconds)
                seconds.append(joins[:, :, q, p, first, last])
            rows.append((q, p, first, last, kind))
    kind_of = cp.new_int_var(0, len(seconds) - 1, f"kind_{name}")
    cp.add_allowed_assignments([v.group[s], v.group[t], begin, end, kind_of], rows)
    table = np.stack(seconds, axis=-1)  # [2, ways, kinds]
    before, behind = (
        v.look_up(v.model.ticks(table[i]), table.shape[1:], [way, kind_of], f"{name}_{i}")
        for i in range(2)
    )
    start = v.model.time(f"start_{name}")
    holds = v.at_least(kind_of, 1, f"holds_{name}")
    for x in stages:
        cp.add(start >= v.done[x]).only_enforce_if(holds, *conditions)
        late = start + before + update[x, 0] + behind
        cp.add(v.total >= late).only_enforce_if(holds, *conditions)


def fit_in_memory(v: Variables) -> None:  # (10)
    """The micro-batches that a stage keeps between their passes fit beside its states."""
    if v.prices.ample:
        return
    cp, prices = v.model.cp, v.prices
    unit = max(1.0, float(prices.limits.max()) / 2**24)
    kept, states = np.floor(prices.kept / unit), np.floor(prices.states / unit)
    most = [max(-1, math.ceil(limit)) for limit in prices.limits / unit]
    kept_ints = [int(min(each, max(most) + 1)) for each in kept.ravel()]
    state_ints = [int(min(each, max(most) + 1)) for each in states.ravel()]
    for s in v.stages:
        held = []
        for c in v.chunks_of:
            place = [v.zero, v.run[s, c], v.divide[s]]
            held.append(v.look_up(state_ints, states.shape, place, f"states_{s}_{c}"))
        limit = cp.new_int_var(-1, max(most), f"limit_{s}")
        cp.add_element(v.group[s], most, limit)
        room = cp.new_int_var(0, max(0, *most), f"room_{s}")
        cp.add(room == limit - sum(held)).only_enforce_if(v.used[s])
        intervals, demands = [], []
        for c, m in product(v.chunks_of, range(v.G)):
            place = [v.mode, v.run[s, c], v.size_of[s, m]]
            demands.append(v.look_up(kept_ints, kept.shape, place, f"kept_{s}_{c}_{m}"))
            if v.turn:  # in turns, which are known with the decision, rather than in ticks
                begin, end = v.turn[0, s, c, m], v.turn[1, s, c, m]
                length = cp.new_int_var(0, 2 * v.C * v.G, f"kept_for_{s}_{c}_{m}")
            else:
                begin, end = v.begin[0, s, c, m], v.end[1, s, c, m]
                length = v.model.time(f"kept_for_{s}_{c}_{m}")
            there = v.present[s, c, m]
            intervals.append(
                cp.new_optional_interval_var(begin, length, end, there, f"keeps_{s}_{c}_{m}")
            )
        cp.add_cumulative(intervals, demands, room)


def order_alike_devices(v: Variables) -> None:  # (11)
    """Symmetry breaking: of two neighbouring devices of a node, the first has the earlier place, or
    both have the same; a device that is not used comes last."""
    cp, prices = v.model.cp, v.prices
    place = [cp.new_int_var(0, v.D, f"place_{d}") for d in range(v.D)]
    for d in range(v.D):
        chosen = []
        for s in v.stages:
            uses = cp.new_bool_var(f"has_{d}_{s}")
            cp.add_element(v.group[s], [int(d in q.devices) for q in prices.groups], uses)
            cp.add(place[d] == s).only_enforce_if(uses)
            chosen.append(uses)
        cp.add(place[d] == v.D).only_enforce_if([~uses for uses in chosen])
        if d > 0 and prices.node[d - 1] == prices.node[d]:
            cp.add(place[d - 1] <= place[d])


def order_the_replicas(v: Variables) -> None:  # (12)
    """Symmetry breaking: the numbers of the replicas' first groups ascend. Of all plans that differ
    in the order of replicas and of alike devices, the one whose groups have lexicographically the
    smallest numbers keeps both (11) and (12)."""
    for s in v.stages[1:]:
        condition = v.opens[s]
        v.model.cp.add(v.head_group[s - 1] < v.group[s]).only_enforce_if(condition)


def outlast_the_passes(v: Variables) -> None:  # (13)
    """Implied: a stage is not done before all its passes are, one after the other; nor is a plan
    faster than all devices together compute, each layer where that is cheapest."""
    cp = v.model.cp
    for s in v.stages:
        cp.add(v.done[s] >= sum(v.seconds[:, s].ravel()))
    cp.add(v.total >= v.model.tick(computing_alone(v.prices.data)))


Constrain = Callable[[Variables], None]
CONSTRAINTS: tuple[Constrain, ...] = (
    know_what_runs_mean,
    use_devices_once,
    hold_all_layers,
    share_the_samples,
    keep_the_rules,
    take_passes,
    send_messages,
    keep_the_order,
    join_and_update,
    fit_in_memory,
    order_alike_devices,
    order_the_replicas,
    outlast_the_passes,
)


def build(
    data: JointData, prices: Prices, run: Run, most: float, *, free: bool = False
) -> Variables:
    """The model and its variables. most: seconds that a decision of interest does not exceed.
    free: whether the order of a stage's passes is free."""
    tasks = 4 * len(prices.kind) * MOST_CHUNKS * data.global_batch
    totals = Totals(least=computing_alone(data), largest=most, roundings=tasks + 3)
    model = ConstraintModel("joint", run, totals)
    v = Variables(model, prices)
    for constrain in CONSTRAINTS:
        if free and constrain is keep_the_order:
            continue
        model.check()
        constrain(v)
    model.cp.minimize(v.total)
    return v


def longest(prices: Prices) -> float:
    """Seconds that no plan exceeds, whose parts follow one after the other."""
    samples, devices = prices.samples, len(prices.kind)
    passes = 4 * samples * float(prices.passes.max())
    messages = 2 * samples * prices.layers * float(prices.messages.max())
    joins = 2 * devices**2 * float(prices.joins(tied=False).max() + prices.joins(tied=True).max())
    return passes + messages + joins + devices * float(prices.updates.max())


def too_large(data: JointData, limits: Parameters) -> str:
    """Why the model does not take an instance; "" where it does."""
    if any(node.rails or node.switch is not None for node in data.nodes):
        return "rails and uplinks are not in the model"
    devices, layers, samples = len(data.devices), len(data.layers), data.global_batch
    passes = 2 * devices * min(MOST_CHUNKS, layers) * samples
    runs = 2**devices * len(data.tensor_degrees) * layers**2 // 2
    prices = runs * samples * len(data.modes)
    if devices > limits.devices or passes > limits.passes or prices > limits.prices:
        return (
            f"{devices} devices, {layers} layers, {samples} samples: the model takes at most "
            f"{limits.devices} devices, {limits.passes} passes and {limits.prices} prices of them"
        )
    return ""


def solve(
    data: JointData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[JointDecision]:
    """The optimum; at the time limit, or where the instance is too large for the model, the bound
    by computing alone, or of the last answer, and the best plan that was priced."""
    begun, solver = run.elapsed, label("cp-sat", run.options)
    bound, built = computing_alone(data), 0.0
    run.report(bound=bound)
    best, message = Best(data, run), too_large(data, parameters)
    if message:
        return Outcome(stop=Stop.LIMIT, bound=bound, solver=solver, message=message)
    exhausted, ended = False, Stop.LIMIT
    try:
        for decision in on_one_device(data):
            run.check()
            best.price(decision)
        prices = Prices(data)
        most = best.seconds if best.decision else longest(prices)
        v = build(data, prices, run, most)
        built = run.elapsed - begun
        while bound < best.seconds * (1 - OPTIMAL_GAP):
            answer = minimise("cp-sat", v.model, run, lambda incumbent, bound: None)
            if answer.stop is Stop.INFEASIBLE:  # no other plan can be faster
                exhausted = True
                break
            bound = max(bound, min(answer.bound or 0.0, best.seconds))
            run.report(bound=bound)
            if not answer.has_solution:
                ended, message = answer.stop, answer.message
                break
            for decision in of_one_shape(read(v, answer), data):
                run.check()
                best.price(decision)
            shape = v.shape()
            v.model.cp.add_forbidden_assignments(shape, [[answer.value(x) for x in shape]])
            if best.decision:
                v.model.cp.add(v.total < math.ceil(best.seconds * v.model.scale.per_unit))
    except Stopped:
        pass
    proven = exhausted or bound >= best.seconds * (1 - OPTIMAL_GAP)
    stop = Stop.ERROR if ended is Stop.ERROR else stop_reason(run)
    if proven:
        stop = Stop.OPTIMAL if best.decision else Stop.INFEASIBLE
        message = "" if best.decision else "no plan fits in memory"
        bound = best.seconds
    return Outcome(
        stop=stop,
        decision=best.decision,
        bound=None if stop is Stop.INFEASIBLE else min(bound, best.seconds),
        build_seconds=built,
        solver=solver,
        message=message,
        details={"priced": best.priced},
    )

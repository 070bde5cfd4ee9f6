"""What one rank does: it joins the group, makes its part of the model, takes the steps, writes
checkpoints, reports, and dies with whoever started it."""

import contextlib
import os
import pkgutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hetplan.errors import (
    HetplanError,
    InputError,
    UnsupportedError,
    kind_and_text,
    one_line,
    require,
)
from hetplan.interpreter import let_find
from hetplan.plans.making import model_of as planned_model
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed, check_own_layers
from hetplan.runtime.engine.chain import Chain, describe
from hetplan.runtime.engine.checkpoint import check_same, check_writable, complete, load, save
from hetplan.runtime.engine.data import seed_generators
from hetplan.runtime.engine.distributed import COMPUTE, Distributed, example_of
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.loop import Trained
from hetplan.runtime.engine.tensors import check_spread
from hetplan.runtime.engine.transport import gather_objects, host_total
from hetplan.runtime.events import PASSES, WAITS, Watch
from hetplan.runtime.job import Job, Report, StepReport
from hetplan.runtime.launch.devices import local_device, peak_bytes, settle
from hetplan.runtime.launch.health import PATIENCE, Activity, at_work
from hetplan.runtime.launch.rehearsal import Virtual
from hetplan.runtime.references import build, stand_in
from hetplan.runtime.replay import read_program
from hetplan.runtime.spmd.distributed import (
    DistributedProgram,
    ProgramModel,
    RehearsedProgram,
    as_model,
    check_samples,
    planned_program,
)
from hetplan.runtime.stock import Stock, check_stock

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
Made = tuple[nn.Module, Chain]


def make_model(
    job: Job, watch: Watch, device: str = "cpu", made: Made | None = None
) -> Trained | RehearsedProgram:
    """This rank's part of the job's model. made: by whoever forked this rank."""
    if isinstance(watch, Virtual) and job.plan.schedule == "spmd":
        return RehearsedProgram(watch)
    if job.plan.schedule == "spmd":
        return DistributedProgram(
            make_program(job), job.plan, device=device, seed=job.seed, watch=watch
        )
    module, chain = made or (make_module(job), None)
    engine = Stock if job.backend == "torch" else Distributed
    return engine(
        module, job.plan, device=device, seed=job.seed, watch=watch, precision=precision_of(job),
        chain=chain if device == "cpu" else None,
    )  # fmt: skip


def make_program(job: Job) -> ProgramModel:
    """The job's single-device program. Raises InputError for an unusable factory."""
    return (
        as_model(called(job.factory, job.plan, seed=job.seed), job.plan)
        if job.factory is not None
        else ProgramModel(planned_program(job.plan, job.model))
    )


def make_module(job: Job) -> nn.Module:
    """The job's model with its data. Raises InputError for an unusable factory."""
    module = model_of(job)
    if job.data is not None:
        require(
            job.factory is not None or not job.virtual,
            "--virtual devices have a model and data of their own",
            got="--data",
        )
        module.batch = called(job.data, job.plan, "--data", seed=job.seed)
    return module


def model_of(job: Job) -> nn.Module:
    """The job's model, on the meta device where it is hetplan's own."""
    workload = job.plan.workload
    if job.factory is not None:
        return from_factory(job.factory, job.plan, seed=job.seed)
    with torch.device("meta"):
        if job.virtual:
            stages = [stage for replica in job.plan.replicas for stage in replica.stages]
            widest = max(len(stage.tensor_shares) for stage in stages)
            return stand_in(workload.layers, tensor=widest, seed=job.seed)
        model = planned_model(job.plan, job.model)
        check_own_layers(job.plan, model)
        assert model.spec.shape is not None and model.sequence is not None
        # whatever attention the plan's stack has, torch's fused one computes here
        shape = replace(model.spec.shape, attention="fused")
        return build(shape, model.sequence, seed=job.seed)


def from_factory(text: str, plan: Plan | None, *, seed: int = 0) -> nn.Module:
    """The torch module that `module:function` makes of the plan; None: there is none yet, a model
    is described. seed: of what it draws."""
    made = called(text, plan, seed=seed)
    if not isinstance(made, nn.Module):
        raise InputError(
            "--factory made something else", got=type(made).__name__, expected="a torch.nn.Module"
        )
    return made


def called(text: str, plan: Plan | None, option: str = "--factory", *, seed: int = 0) -> Any:
    """What `module:function` makes of the plan; the module is installed, or else in the working
    folder. Raises InputError for whatever its author's code raises.

    Every rank imports the module or calls the function itself, so that the generators from which
    they draw data and weights are seeded before the import, and again before the call: what the
    function draws does not depend on whether the module was imported just now.
    """
    require(
        all(text.partition(":")), f"{option} is not usable", got=text, expected="MODULE:FUNCTION"
    )
    let_find(text.partition(":")[0], option)
    failure = "cannot be imported:"
    try:
        seed_generators(seed, f"{option} is imported")
        function = pkgutil.resolve_name(text)
        failure = "raises"
        seed_generators(seed, f"{option} is called")
        return function(plan)
    except HetplanError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{option} {failure} {kind_and_text(error)}", got=text) from error


def check_job(job: Job) -> Made | None:
    """The module and its chain for the forked ranks; None for SPMD programs.

    Raises InputError for all that can be wrong with plan and model, before a process starts.
    """
    check_executed(job.plan)
    check_folder(job)
    if job.plan.schedule == "spmd":
        check_program(job)
        return None
    module = make_module(job)
    chain = describe(
        module, job.plan.workload.layers, example_of(module), compute=COMPUTE[precision_of(job)],
        spread=1 if job.virtual else job.plan.further.expert,
    )  # fmt: skip
    for place in job.plan.places:
        check_spread(chain, Layout(job.plan), place)
    if job.backend == "torch":
        check_stock(job.plan, chain)
    if job.save is not None:
        check_writable(job.save)
        chain.check_gathers()
    return module, chain


def precision_of(job: Job) -> Literal["fp32", "bf16", "fp16"]:
    """Of the passes: the plan's for reference models; a user's own model and a stand-in choose
    theirs."""
    return "fp32" if job.virtual or job.factory is not None else job.plan.workload.precision


def check_folder(job: Job) -> None:
    """Raise InputError where a run from the beginning would mix its checkpoints with another run's,
    and where one that goes on would not be the run that it goes on with."""
    if job.checkpoint is None:
        return
    check_writable(job.checkpoint)
    if job.resume:
        check_same(job.checkpoint, optimizer=job.optimizer, seed=job.seed)
    elif checkpoints := complete(job.checkpoint):
        raise InputError(
            "folder holds checkpoints", where=job.checkpoint, got=checkpoints[-1].name,
            expected="an empty one, or --resume to go on from the latest",
        )  # fmt: skip


def check_program(job: Job) -> None:
    """The same of an SPMD plan; a rehearsal's costs have read its program already."""
    require(job.data is None, "SPMD programs take their data from --factory", got="--data")
    if not job.virtual:
        program = make_program(job).program
        check_samples(program, job.plan)
        read_program(job.plan, program)
    elif job.checkpoint is not None:
        raise InputError(
            "rehearsals of SPMD programs train nothing", where=job.plan.name, got="--checkpoint",
            expected="no checkpoint, or no --virtual",
        )  # fmt: skip
    if job.backend == "torch":
        check_stock(job.plan, None)
    require(
        job.save is None,
        "SPMD programs are not gathered",
        where=job.plan.name,
        got="--save",
        expected="--checkpoint, or a plan of another strategy",
        kind=UnsupportedError,
    )


def watch_of(job: Job, rank: int) -> Watch:
    """What watches this rank: with virtual devices, what sleeps for them, too."""
    if not job.virtual or job.rehearsal is None:
        return Watch()
    spans = job.rehearsal.spans(rank)
    return Virtual(rehearsal=job.rehearsal, spans=spans, gather=gather_objects)


def train(
    job: Job,
    watch: Watch,
    report: Report,
    stopping: Callable[[], bool],
    made: Made | None = None,
) -> None:
    """All steps on this rank, inside a process group; `stopping` asks whether to end behind a
    step. made: by whoever forked this rank."""
    device = local_device(job.device)
    model: Any = make_model(job, watch, device, made)
    optimizer = model.optimizer(OPTIMIZERS[job.optimizer], lr=job.learning_rate)
    if job.resume and job.checkpoint is not None:
        load(model, optimizer, job.checkpoint)
    first, last = model.step, model.step + job.steps - 1
    for step in range(first, last + 1):
        if device != "cpu" and step == last:  # else a GPU never waits to be looked at
            watch.settle = lambda: settle(device)
        loss = model.train_step()
        with watch.during("optimizer", 0, step):
            optimizer.step()
            optimizer.zero_grad()
        report(step_report(job, watch, step, loss, peak_bytes(device), traced=step == last))
        stop = host_total(float(stopping())) > 0  # where any rank wishes so, on all
        due = stop or step == last or (job.every is not None and (step + 1) % job.every == 0)
        if job.checkpoint is not None and due:
            with watch.during("checkpoint", 0, step):
                save(model, optimizer, job.checkpoint)
        if stop:
            return
    if job.save is not None:
        with watch.during("checkpoint", 0, last):
            trained = model.gather()
            if dist.get_rank() == 0 and hasattr(trained, "save_pretrained"):
                trained.save_pretrained(job.save)
            elif dist.get_rank() == 0:
                torch.save(trained.state_dict(), Path(job.save) / "model.pt")


def step_report(
    job: Job, watch: Watch, step: int, loss: float, peak: int, *, traced: bool
) -> StepReport:
    """A step's times from its events; it begins behind the preparation, where all ranks have met.

    Virtual devices have slept their updates with the gradients.
    """
    events = [e for e in watch.events if not (job.virtual and e.what == "optimizer")]
    forward, backward, waits = (
        sum(e.end - e.start for e in events if e.what in kinds)
        for kinds in (["forward"], ["backward"], set(WAITS) - {"prepare"})
    )
    begin, end = next(e.end for e in events if e.what == "prepare"), events[-1].end
    traced_events = events if traced else []
    return StepReport(step, loss, begin, end, forward, backward, waits, peak, traced_events)


def rank_main(
    job: Job,
    rank: int,
    store: str,
    connection: Connection,
    parents: Sequence[Connection],
    stop: Any,
    made: Made | None,
) -> None:
    """Never returns. Exit code 0, or 1 with the reason told.

    parents: ends of pipes that are the parent's alone. stop: its value says whether to end behind
    the step.
    """
    lock = threading.Lock()

    def tell(kind: str, what: object = None) -> None:
        """Send (kind, what) to the parent; the process ends where it no longer listens."""
        with lock:
            try:
                connection.send((kind, what))
            except BrokenPipeError:
                os._exit(1)

    for end in parents:
        end.close()
    code = 1
    try:
        # signals to the whole group are the parent's to act upon
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        watch = watch_of(job, rank)
        every_beat(lambda: tell("beat", watch.state()))
        world = job.plan.world_size
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=30),
        )
        train(job, watch, lambda step: tell("step", step), lambda: stop.value != 0, made)
        dist.barrier()
        dist.destroy_process_group()
        tell("done")
        code = 0
    except BaseException as error:  # noqa: BLE001 (the last boundary of the process: whatever it is, it is told)
        tell("failed", (error_text(error), is_lost(error)))
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def every_beat(act: Callable[[], None]) -> None:
    """Do something again and again, in a thread of its own."""

    def beats() -> NoReturn:
        while True:
            act()
            time.sleep(PATIENCE.beat)

    threading.Thread(target=beats, daemon=True).start()


def look_after(watch: Watch, limit: float, plan: Plan) -> None:
    """Where nobody else watches: from now on a thread ends the process, with one line, where a pass
    neither goes on nor computes, or where the next rank is stopped.

    Ranks beat in a store of torch's, by a connection of its own: a rank that waits in the group's
    store would hold up the thread. A beat that stays away is counted in this thread's own looks, so
    that a machine that slept, or a rank without a core, suspects nobody.
    """
    activity, rank, following = Activity(), dist.get_rank(), (dist.get_rank() + 1) % plan.world_size
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    everyones = dist.TCPStore(address, port, wait_for_workers=False) if following != rank else None
    store = dist.PrefixStore(f"hetplan {again}", everyones or dist.HashStore())
    looks = Counter[int]()  # by the number of the following rank's beats

    def look() -> None:
        state = watch.state()
        with contextlib.suppress(dist.DistError):  # behind the last step the store may end first
            store.add(str(rank), 1)
            beats = store.add(str(following), 0)
            looks[beats] += 1
            silent = looks[beats] * PATIENCE.beat
            if beats and silent > limit and state["what"] != "end":
                give_up(plan, following, f"no sign of life for {silent:.0f} s")
        activity.note(state["used"])
        quiet = min(state["quiet"], activity.idle())
        waits = state["what"] not in PASSES or state["meeting"] is not None
        if not waits and quiet > limit and not at_work(os.getpid(), threading.get_native_id()):
            at = "at {what} of chunk {chunk}, micro-batch {batch}".format(**state)
            give_up(plan, rank, f"{at} for {quiet:.0f} s")

    every_beat(look)


def give_up(plan: Plan, rank: int, why: str) -> NoReturn:
    """End this process because a rank hangs."""
    text = one_line(f"hetplan: {plan.rank_text(rank)}: hangs; {why}")
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


# What errors of torch.distributed say where another rank is gone.
PEER_GONE = (
    "connection closed", "connection reset", "broken pipe", "connection refused", "timed out",
    "socket closed", "peer closed", "read error", "aborted", "gloo",
)  # fmt: skip


def is_lost(error: BaseException) -> bool:
    """Whether a rank died because another one did."""
    text = str(error).lower()
    peers = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return peers and any(word in text for word in PEER_GONE)


def error_text(error: BaseException) -> str:
    """An error as one line; what the CPU's allocator raises has no type of its own."""
    if isinstance(error, HetplanError):
        return str(error)
    text = one_line(str(error))
    short = isinstance(error, RuntimeError) and "allocate memory" in text
    return (
        f"out of memory: {text[:300]}"
        if short or isinstance(error, (MemoryError, torch.OutOfMemoryError))
        else kind_and_text(error)
    )

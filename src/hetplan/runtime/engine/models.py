"""The torch module that a job names, and its chain of layers."""

import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from hetplan.errors import HetplanError, InputError, kind_and_text, place_outside, require
from hetplan.interpreter import make_importable
from hetplan.plans.making import model_of as planned_model
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_layers
from hetplan.runtime.engine.chain import Chain, describe
from hetplan.runtime.engine.checkpoint import check_writable
from hetplan.runtime.engine.data import seed_generators
from hetplan.runtime.engine.distributed import COMPUTE, example_of
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.packing import Packing, check_apart
from hetplan.runtime.engine.probe import check_probe, in_a_fork
from hetplan.runtime.engine.tensors import check_meshes
from hetplan.runtime.job import Job
from hetplan.runtime.references import build, stand_in
from hetplan.text import percent_text


def described(job: Job) -> tuple[nn.Module, Chain]:
    """The job's module and its chain. Raises InputError for an unusable factory, UnsupportedError
    for layers that the plan's tensor ranks cannot divide."""
    module = make_module(job)
    if job.pack and os.environ.get("RANK", "0") == "0":
        packing: Any = module.packing
        check_apart(module, packing)
        share = percent_text(packing.padding(0))
        print(f"hetplan: {share} of the first step's tokens are padding", file=sys.stderr)
    example = example_of(module)
    chain = chain_of(job, module, example)
    layout = Layout(job.plan)
    for place in job.plan.places:
        check_meshes(chain, layout, place)
    # under torchrun one rank compares for all
    if job.factory is not None and os.environ.get("RANK", "0") == "0":
        spread = job.plan.further.expert
        note = in_a_fork(
            lambda: check_probe(module, chain, example, spread=spread, wanted=job.probe)
        )
        if note is not None:
            print(f"hetplan: {note}", file=sys.stderr, flush=True)
    return module, chain


def chain_of(job: Job, module: nn.Module, example: Any, device: str = "cpu") -> Chain:
    """The chain of a job's module on a device. example: (inputs, targets) of a sample or more."""
    return describe(
        module,
        job.plan.workload.layers,
        example,
        compute=COMPUTE[precision_of(job)],
        device=device,
        # the stand-in of a rehearsal has no experts
        spread=1 if job.virtual else job.plan.further.expert,
    )


def check_saved(job: Job, chain: Chain) -> None:
    """Raise InputError where the trained module could not be written at the end."""
    if job.save is not None:
        check_writable(job.save)
        chain.check_gathers()


def precision_of(job: Job) -> Literal["fp32", "bf16", "fp16"]:
    """The precision of the passes: the plan's for a reference model; "fp32", which changes no type,
    for a user's model and for a stand-in."""
    return "fp32" if job.virtual or job.factory is not None else job.plan.workload.precision


def make_module(job: Job) -> nn.Module:
    """The job's model, whose method `batch` gives the job's data, and whose attribute `packing` is
    that of packed samples. Raises InputError for an unusable factory."""
    module = model_of(job)
    data: Any = None
    if job.data is not None:
        require(
            job.factory is not None or not job.virtual,
            "--virtual devices have a model and data of their own",
            got="--data",
        )
        data = called(job.data, job.plan, "--data", seed=job.seed)
    if job.pack:
        sample: Any = data or getattr(module, "sample", None)
        require(
            callable(sample),
            "model has no `sample`",
            where="--pack",
            got=type(module).__name__,
            expected="sample(number): the tokens of a sample of any length",
        )
        module.packing = Packing(sample, job.pack)
        module.batch = module.packing.batch
    elif data is not None:
        module.batch = data
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
        # Attention always runs as torch's fused kernel, whatever the plan's framework has.
        shape = replace(model.spec.shape, attention="fused")
        return build(shape, model.sequence, seed=job.seed)


def from_factory(text: str, plan: Plan | None, *, seed: int = 0) -> nn.Module:
    """The torch module that the user's function returns.

    text: `module:function`. plan: the function's argument; None where a model is described before
    there is a plan. seed: of the random numbers that the function draws.
    """
    module = called(text, plan, seed=seed)
    if not isinstance(module, nn.Module):
        raise InputError(
            "--factory made something else", got=type(module).__name__, expected="a torch.nn.Module"
        )
    return module


def check_planned(module: nn.Module, names: Sequence[str], wanted: bool | None) -> str | None:
    """Compare a module that is to be planned with the layers that a plan would train. Returns a
    note where nothing was compared, and on a module that cannot be split, which programs alone can
    train. Raises UnsupportedError where they differ.

    names: the layers of the module's trace. wanted: as in `engine.probe.check_probe`.
    """
    if wanted is False:
        return None
    example = example_of(module)
    try:
        chain = describe(module, names, example)
    except HetplanError as error:
        return f"`hetplan run` will refuse all plans but those of hap: {error}"
    return in_a_fork(lambda: check_probe(module, chain, example, wanted=wanted))


def called(text: str, plan: Plan | None, option: str = "--factory", *, seed: int = 0) -> Any:
    """The result of a user's function, called with the plan.

    text: `module:function`; the module is installed, or else in the working folder. option: the
    command-line option with the text, for errors. Raises InputError for any exception of the user's
    code.

    Every rank calls the function itself. So the generators of random numbers are seeded before the
    import, and again before the call: the numbers that the function draws do not depend on whether
    the module was imported before.
    """
    module, colon, function_name = text.partition(":")
    require(
        module and colon and function_name,
        f"{option} is not usable",
        got=text,
        expected="MODULE:FUNCTION",
    )
    make_importable(module, option)
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
        place = place_outside(error)
        raise InputError(
            f"{option} {failure} {kind_and_text(error)}", where=place, got=text
        ) from error

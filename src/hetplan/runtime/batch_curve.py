"""A batch curve file from a live device: Algorithm 1 under every ZeRO stage, each micro-batch size
measured once."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from hetplan.errors import InputError
from hetplan.profiling.batch_curve import BatchCurve, CurvePoint
from hetplan.profiling.models import Model
from hetplan.profiling.profile import Provenance
from hetplan.runtime.trial import Trial, check_device, explore_stages


def measure_batch_curve(
    model: Model,
    device: str,
    *,
    memory: float | None = None,
    name: str | None = None,
    devices: int = 1,
    largest: int = 256,
    repeats: int = 3,
    tell: Callable[[str], None] | None = None,
) -> BatchCurve:
    """Measure `model` on the torch device `device`.

    memory: bytes to keep within, default what the GPU has free (a CPU needs a figure). name: the
    device's type in cluster files. devices: size of the ZeRO group that shares the states. largest:
    of the micro-batches tried. repeats: timed passes per size. tell: receives a line per size
    tried.
    Raises UnsupportedError without torch or for a model that has no torch layers, InputError for
    arguments.
    """
    for what, value in (
        ("devices", devices),
        ("largest micro-batch", largest),
        ("repeats", repeats),
    ):
        if value < 1:
            raise InputError(what, got=value, expected="at least 1")
    check_device(device)
    limit = free_bytes(device) if memory is None else memory
    if limit is None or not 0 < limit < 1e30:
        raise InputError(
            "memory limit", got=memory, expected="more than 0 bytes; a CPU needs --memory-gib"
        )
    trial = Trial(model, device, limit, devices, largest, repeats, tell)
    sizes = [found.largest for found in explore_stages(trial)]
    sample = max(trial.passes, default=None)
    return BatchCurve(
        model=model.name,
        sequence=model.sequence or 1,
        precision=model.precision,
        device=name or device_name(device),
        devices=devices,
        memory_bytes=limit,
        provenance=Provenance(
            kind="measured",
            source=f"hetplan profile --batch-curve, {torch_version()} on {device_name(device)}",
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        ),
        zero_stage=next((stage for stage, size in enumerate(sizes) if size), None),
        largest=sizes,
        saved_bytes_per_sample=None
        if sample is None
        else trial.passes[sample].saved_bytes / sample,
        tried_up_to=largest,
        points=[
            CurvePoint(micro_batch=batch, seconds=found.seconds, spread_seconds=found.spread)
            for batch, found in sorted(trial.passes.items())
        ],
    )


def free_bytes(device: str) -> float | None:
    """What the GPU has free, None for a CPU, whose memory is shared with everything else."""
    if device == "cpu":
        return None
    import torch

    return float(torch.cuda.mem_get_info(device)[0])


def device_name(device: str) -> str:
    """What torch calls the device."""
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_name(device))


def torch_version() -> str:
    """`torch 2.13.0+cpu`."""
    import torch

    return f"torch {torch.__version__}"

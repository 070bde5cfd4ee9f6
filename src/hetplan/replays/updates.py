"""The optimizer's step: the bytes that Adam moves, and its seconds on the host."""

import numpy as np

from hetplan.replays.arrays import Floats, Numbers

FP32 = 4  # bytes


def adam_bytes(weight: int, gradient: int) -> int:
    """Bytes that Adam reads and writes per parameter.

    It reads the gradient, the fp32 weight and two fp32 moments, and writes the fp32 weight and the
    two moments; in mixed precision it also writes the 16-bit weight. Source: Kingma and Ba 2015,
    Algorithm 1, with fp32 states as in Rajbhandari et al. 2020 (ZeRO), Section 3.1.

    weight: bytes of a weight as passes read it. gradient: bytes of a gradient as Adam reads it.
    """
    read, written = gradient + 3 * FP32, 3 * FP32
    narrow = weight if weight < FP32 else 0
    return read + written + narrow


# Bytes per parameter with 16-bit gradients; fp32 weights and gradients move equally many.
UPDATE_BYTES = adam_bytes(weight=2, gradient=2)


def host_update_seconds(
    params: Numbers,
    moved: int,
    host_memory: float,
    exchanged: int,
    host_link: float,
    window: Numbers,
) -> Floats:
    """Seconds of updating offloaded optimizer states on the host:
    params moved / host_memory + max(params exchanged / host_link - window, 0).

    They are those of Adam in the host's memory, and of the transfers between device and host as far
    as computation does not hide them. Source: Ren et al. 2021 (ZeRO-Offload), Sections 3.1 and 4.1.

    params: parameters whose states are on the host. moved: bytes that Adam moves per parameter.
    host_memory: bytes/s of the host's memory per device. exchanged: bytes per parameter of the
    gradient, which goes to the host, and of the weight, which comes back. host_link: bytes/s of a
    device to its host. window: seconds of computation that hide transfers; 0 where none does.
    """
    updating = params * moved / host_memory
    transfers = params * exchanged / host_link
    return np.asarray(updating + np.maximum(transfers - window, 0.0))

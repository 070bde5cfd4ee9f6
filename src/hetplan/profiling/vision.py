"""Image models as layer chains: ViT, VGG, and TransGAN's generator as the AMP authors changed it.

Samples are images of the model's own size; these models have no sequence argument.
"""

from functools import cache
from pathlib import Path
from typing import Any

from hetplan.files import read_yaml
from hetplan.profiling.operators import Elementwise, Layer, Matmul, Saved
from hetplan.profiling.transformer import Transformer, block, norm, transformer

# Widths of 3x3 convolutions; 0: pooling.
VGG19 = (*(64, 64, 0, 128, 128, 0), *((256,) * 4), 0, *((512,) * 4), 0, *((512,) * 4), 0)


def encoder(hidden: int, layers: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """A transformer encoder without vocabulary or dropout."""
    return transformer(
        layers, hidden, heads, feed_forward, **{"vocabulary": 0, "dropout": False, **changes}
    )


def vit_layers(
    t: Transformer, *, image: int = 224, patch: int = 16, classes: int = 1000
) -> tuple[Layer, ...]:
    """ViT (Dosovitskiy et al. 2021): patch embedding with class token, blocks, norm and
    classifier."""
    patches, pixels = (image // patch) ** 2, 3 * patch * patch
    s, h = patches + 1, t.hidden
    first = Layer(
        "patches",
        "embedding",
        pixels * h + h + h + s * h,
        (
            Matmul("patches", patches, pixels, h, left=3 * image * image, input_gradient=False),
            Elementwise("positions", 3 * s * h, 2 * s * h),
        ),
        s * h,
        (Saved("image", 3 * image * image, split=False),),
    )
    last = Layer(
        "head",
        "head",
        t.norm_params + h * classes + classes,
        (
            norm("final-norm", s * h),
            Matmul("classifier", 1, h, classes),
            Elementwise("loss", 3 * classes, 2 * classes),
        ),
        0,
        (Saved("final norm input", s * h, split=False), Saved("head input", h, split=False)),
    )
    return (first, *(block(t, s, i) for i in range(t.layers)), last)


@cache
def described(network: str) -> tuple[Layer, ...]:
    """Layers that stand in `networks.yaml`: of VGG-19 all, of TransGAN's generator its ends and
    what lies between its blocks."""
    return tuple(
        Layer(
            **row
            | {
                "operators": tuple(
                    Matmul(**op) if "m" in op else Elementwise(**op) for op in row["operators"]
                ),
                "saved": tuple(Saved(**tensor) for tensor in row["saved"]),
            }
        )
        for row in read_yaml(Path(__file__).with_name("networks.yaml"))[network]
    )


def transgan_layers(
    wide: Transformer, narrow: Transformer, *, bottom: int = 9
) -> tuple[Layer, ...]:
    """TransGAN's generator (Jiang et al. 2021) as AMP uses it: blocks at two of its six
    resolutions.

    wide: h = 1024 on bottom x bottom tokens, the first resolution. narrow: h = 16 on (32 bottom)^2
    tokens, attention in windows of 16 x 16. AMP (NeurIPS 2022), Section 4.1 and its released
    configuration (bottom 9).
    """
    first, upsample, last = described("transgan-amp")
    before = [block(wide, bottom**2, i) for i in range(wide.layers)]
    after = [block(narrow, (32 * bottom) ** 2, wide.layers + i) for i in range(narrow.layers)]
    return (first, *before, upsample, *after, last)

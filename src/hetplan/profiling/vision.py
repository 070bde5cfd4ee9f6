"""Image models as layer chains: ViT, VGG, and TransGAN's generator as the AMP authors changed it.

Samples are images of the model's own size; these models have no sequence argument.
"""

from typing import Any

from hetplan.profiling.operators import Elementwise, Layer, Matmul, Operator, Saved
from hetplan.profiling.transformer import Transformer, block, norm, transformer

# Widths of 3x3 convolutions; 0: pooling.
VGG19 = (*(64, 64, 0, 128, 128, 0), *((256,) * 4), 0, *((512,) * 4), 0, *((512,) * 4), 0)


def encoder(hidden: int, layers: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """A transformer encoder without vocabulary or dropout."""
    shape = {"vocabulary": 0, "dropout": False, **changes}
    return transformer(layers, hidden, heads, feed_forward, **shape)


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


def vgg_layers(
    plan: tuple[int, ...] = VGG19, *, image: int = 224, classes: int = 1000
) -> tuple[Layer, ...]:
    """VGG (Simonyan and Zisserman 2015, configuration E): 3x3 convolutions, 0 = pooling, three
    linear layers.

    A convolution is one matrix product of all pixels with k = 9 channels; pooling belongs to the
    layer before it.
    """
    layers: list[Layer] = []
    channels, side = 3, image
    for i, width in enumerate(plan):
        if width:
            pooled = i + 1 < len(plan) and plan[i + 1] == 0
            layers.append(
                convolution(f"conv-{len(layers)}", channels, width, side, pooled, first=not layers)
            )
            channels = width
        else:
            side //= 2
    features = channels * 7 * 7
    for name, inside, outside in (("fc-0", features, 4096), ("fc-1", 4096, 4096)):
        operators = (
            Matmul(name, 1, inside, outside),
            Elementwise("relu-dropout", 2 * outside, 3 * outside),
        )
        saved = (
            Saved("input", inside, split=False),
            Saved("dropout mask", outside, split=False, element_bytes=1),
        )
        params = inside * outside + outside
        layers.append(Layer(name, "linear", params, operators, outside, saved))
    head = (Matmul("head", 1, 4096, classes), Elementwise("loss", 3 * classes, 2 * classes))
    params = 4096 * classes + classes
    layers.append(Layer("head", "linear", params, head, 0, (Saved("input", 4096, split=False),)))
    return tuple(layers)


def convolution(
    name: str, channels: int, width: int, side: int, pooled: bool, *, first: bool
) -> Layer:
    """3x3 convolution with bias and in-place ReLU, and 2x2 maximum pooling where `pooled`."""
    pixels = side * side
    out = pixels * width
    operators: list[Operator] = [
        Matmul(name, pixels, 9 * channels, width, left=pixels * channels, input_gradient=not first),
        Elementwise("relu", 2 * out, 3 * out),
    ]
    saved = [Saved("input", pixels * channels, split=False)]
    if pooled:
        operators.append(Elementwise("pool", out + out // 4, out + out // 4))
        saved.append(Saved("pool input", out, split=False))
        saved.append(Saved("pool indices", out // 4, split=False, element_bytes=8))
    params = 9 * channels * width + width
    return Layer(
        name, "convolution", params, tuple(operators), out // 4 if pooled else out, tuple(saved)
    )


def transgan_layers(
    wide: Transformer, narrow: Transformer, *, latent: int = 512, bottom: int = 9
) -> tuple[Layer, ...]:
    """TransGAN's generator (Jiang et al. 2021) as AMP uses it: blocks at two of its six
    resolutions.

    wide: h = 1024 on bottom x bottom tokens, the first resolution. Two bicubic upsamplings keep the
    width and three pixel shuffles quarter it, so narrow: h = 16 on (32 bottom)^2 tokens, attention
    in windows of 16 x 16. The resolutions between hold position vectors only. AMP (NeurIPS 2022),
    Section 4.1 and its released configuration (bottom 9).
    """
    s, h = bottom * bottom, wide.hidden
    first = Layer(
        "latent",
        "embedding",
        latent * s * h + s * h + s * h,
        (
            Matmul("latent", 1, latent, s * h, input_gradient=False),
            Elementwise("positions", 3 * s * h, 2 * s * h),
        ),
        s * h,
        (Saved("latent", latent, split=False),),
    )
    upsample = upsampling(h, bottom)
    tokens = (32 * bottom) ** 2
    assert tokens * narrow.hidden == upsample.output
    pixels = Matmul("pixels", tokens, narrow.hidden, 3)
    last = Layer(
        "head",
        "head",
        3 * narrow.hidden + 3,
        (pixels, Elementwise("loss", 3 * tokens, 3 * tokens)),
        0,
        (Saved("head input", tokens * narrow.hidden, split=False),),
    )
    before = [block(wide, s, i) for i in range(wide.layers)]
    after = [block(narrow, tokens, wide.layers + i) for i in range(narrow.layers)]
    return (first, *before, upsample, *after, last)


def upsampling(hidden: int, bottom: int) -> Layer:
    """From the first resolution to the sixth: two bicubic steps, three pixel shuffles, position
    vectors."""
    widths = (hidden, hidden, hidden // 4, hidden // 16, hidden // 64)
    sizes = [(2 * bottom << i) ** 2 * width for i, width in enumerate(widths)]
    moves = sum(3 * size for size in sizes)
    operators = (Elementwise("upsample", moves, moves),)
    return Layer("upsample", "upsample", sum(sizes), operators, sizes[-1], ())

"""Models with encoders as chains of layers: ViT, T5 and CLIP.

A pipeline carries along what a later layer needs: through T5's blocks pass both texts, through
CLIP's text blocks the vector of the image. Of CLIP's loss only the pairs of one micro-batch count.
"""

from dataclasses import replace

from hetplan.profiling.models.operators import Elementwise, Layer, Matmul, Reduce, Saved
from hetplan.profiling.models.transformer import (
    Transformer,
    attention_operators,
    attention_params,
    attention_saved,
    block,
    embedding,
    head,
    norm,
    residual,
)


def vit_layers(
    t: Transformer, image: int = 224, patch: int = 16, classes: int = 1000
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


def t5_layers(t: Transformer, decoders: int, buckets: int, sequence: int) -> tuple[Layer, ...]:
    """T5 (Raffel et al. 2020, Section 2.1): an encoder of t.layers blocks and a decoder, whose
    blocks also attend to what the encoder gave; one embedding of both texts, each of `sequence`
    tokens. The first block of each has the vectors of relative positions."""
    s, count, size = sequence, t.layers, sequence * t.hidden
    encoder, positions = replace(t, vocabulary=0), buckets * t.heads
    chain = [
        replace(block(encoder, s, i), name=f"encoder-{i}", output=2 * size) for i in range(count)
    ]
    attention = (norm("norm-3", size), *attention_operators(encoder, s))
    for i in range(decoders):
        own = block(t, s, count + i)
        beside = Reduce(size, backward=False), Reduce(size, backward=True)
        layer = replace(
            own,
            name=f"decoder-{i}",
            params=own.params + attention_params(encoder) + t.norm_params,
            operators=(*own.operators, *attention, residual("residual-3", size, t.dropout)),
            saved=own.saved + attention_saved(encoder, s),
            reduces=own.reduces + beside,
            output=2 * size if i < decoders - 1 else size,
        )
        chain.append(layer)
    for at, more in ((0, positions), (count - 1, t.norm_params), (count, positions)):
        chain[at] = replace(chain[at], params=chain[at].params + more)
    first = embedding(t, s)
    both = replace(
        first,
        name="embeddings",
        operators=2 * first.operators,
        saved=2 * first.saved,
        output=2 * size,
        reduces=2 * first.reduces,
    )
    return (both, *chain, head(t, s))


def clip_layers(
    vision: Transformer, text: Transformer, image: int, patch: int, width: int
) -> tuple[Layer, ...]:
    """CLIP (Radford et al. 2021, Section 2.4): an encoder of images, then one of text as long as
    its positions; both end as vectors of that width, of which all pairs are compared."""
    (first, *blocks, _), h, s = vit_layers(vision, image, patch), text.hidden, text.positions
    first = replace(
        first,  # no bias, but a norm
        params=first.params - vision.hidden + vision.norm_params,
        operators=(*first.operators, norm("embedding-norm", first.output)),
        saved=(*first.saved, Saved("embedding norm input", first.output, split=False)),
    )
    words = embedding(text, s)
    between = replace(
        words,
        name="text-embedding",
        params=words.params + vision.norm_params + vision.hidden * width,
        operators=(
            norm("image-norm", vision.hidden),
            Matmul("image-projection", 1, vision.hidden, width),
            *words.operators,
        ),
        saved=(*words.saved, Saved("image-projection input", 2 * vision.hidden, split=False)),
        output=words.output + width,
    )
    texts = [
        replace(one, name=f"text-{one.name}", output=one.output + width)
        for one in (block(text, s, i) for i in range(text.layers))
    ]
    last = Layer(
        "head",
        "head",
        text.norm_params + h * width + 1,
        (
            norm("final-norm", s * h),
            Matmul("text-projection", 1, h, width),
            Elementwise("loss", 8 * width, 8 * width),
        ),
        0,
        (Saved("final norm input", s * h, split=False), Saved("head input", h, split=False)),
    )
    return (first, *blocks, between, *texts, last)

"""Models with encoders as chains of layers: ViT, T5 and CLIP.

A layer of a chain receives only the output of the layer before it, so the output also carries the
tensors that later layers need. The blocks of T5 pass on both texts, the text blocks of CLIP the
vector of the image. CLIP's loss counts only the pairs of one micro-batch.

Symbols: s tokens, h hidden size.
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
    """The layers of ViT (Dosovitskiy et al. 2021): patch embedding with class token, blocks, norm
    and classifier. image, patch: pixels of a side."""
    patches = (image // patch) ** 2
    patch_size = 3 * patch * patch
    image_size = 3 * image * image
    s, h = patches + 1, t.hidden
    projection, class_token, positions = patch_size * h + h, h, s * h  # parameters
    first = Layer(
        name="patches",
        kind="embedding",
        params=projection + class_token + positions,
        operators=(
            Matmul(
                "patches",
                patches,
                patch_size,
                h,
                left=image_size,
                input_gradient=False,
                narrow=False,
            ),
            Elementwise("positions", 3 * s * h, 2 * s * h),
        ),
        output=s * h,
        saved=(Saved("image", image_size, split=False),),
    )
    last = Layer(
        name="head",
        kind="head",
        params=t.norm_params + h * classes + classes,
        operators=(
            norm("final-norm", s * h),
            Matmul("classifier", 1, h, classes, narrow=False),
            Elementwise("loss", 3 * classes, 2 * classes),
        ),
        output=0,
        saved=(Saved("final norm input", s * h, split=False), Saved("head input", h, split=False)),
    )
    return (first, *(block(t, s, i) for i in range(t.layers)), last)


def t5_layers(t: Transformer, decoders: int, buckets: int, sequence: int) -> tuple[Layer, ...]:
    """The layers of T5 (Raffel et al. 2020, Section 2.1): one embedding of two texts of `sequence`
    tokens each, an encoder of `t.layers` blocks, and a decoder of `decoders` blocks, which also
    attend to the encoder's output.

    buckets: number of relative positions; the first block of the encoder and of the decoder have
    their vectors.
    """
    s, encoders, size = sequence, t.layers, sequence * t.hidden  # size: numbers of one text
    encoder = replace(t, vocabulary=0)  # without a vocabulary, attention is not causal
    chain = [
        replace(block(encoder, s, i), name=f"encoder-{i}", output=2 * size) for i in range(encoders)
    ]
    attention = (norm("norm-3", size), *attention_operators(encoder, s))
    for i in range(decoders):
        own = block(t, s, encoders + i)
        cross_reduces = Reduce(size, backward=False), Reduce(size, backward=True)
        layer = replace(
            own,
            name=f"decoder-{i}",
            params=own.params + attention_params(encoder) + t.norm_params,
            operators=(*own.operators, *attention, residual("residual-3", size, t.dropout)),
            saved=own.saved + attention_saved(encoder, s),
            reduces=own.reduces + cross_reduces,
            output=2 * size if i < decoders - 1 else size,
        )
        chain.append(layer)
    positions = buckets * t.heads
    further_params = (
        (0, positions),  # the encoder's first block
        (encoders - 1, t.norm_params),  # the norm after its last block
        (encoders, positions),  # the decoder's first block
    )
    for i, params in further_params:
        chain[i] = replace(chain[i], params=chain[i].params + params)
    first = embedding(t, s)
    # both texts look their tokens up in one table: every operator and tensor twice, params once
    both_texts = replace(
        first,
        name="embeddings",
        operators=(*first.operators, *first.operators),
        saved=(*first.saved, *first.saved),
        output=2 * size,
        reduces=(*first.reduces, *first.reduces),
    )
    return (both_texts, *chain, head(t, s))


def clip_layers(
    vision: Transformer, text: Transformer, image: int, patch: int, width: int
) -> tuple[Layer, ...]:
    """The layers of CLIP (Radford et al. 2021, Section 2.4): an encoder of images, then one of
    texts, which have as many tokens as the text encoder has positions.

    Each encoder ends with a projection to a vector of `width` numbers; the loss compares all pairs
    of an image's and a text's vector. image, patch: pixels of a side.
    """
    first, *blocks, _ = vit_layers(vision, image, patch)
    h, s = text.hidden, text.positions
    first = replace(
        first,  # unlike ViT's, it has no bias, but a norm
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
            Matmul("image-projection", 1, vision.hidden, width, narrow=False),
            *words.operators,
        ),
        # the class token before and after its norm
        saved=(*words.saved, Saved("image-projection input", 2 * vision.hidden, split=False)),
        output=words.output + width,
    )
    text_blocks = []
    for i in range(text.layers):
        text_block = block(text, s, i)
        text_blocks.append(
            replace(text_block, name=f"text-{text_block.name}", output=text_block.output + width)
        )
    last = Layer(
        name="head",
        kind="head",
        params=text.norm_params + h * width + 1,  # 1: the temperature of the loss
        operators=(
            norm("final-norm", s * h),
            Matmul("text-projection", 1, h, width, narrow=False),
            Elementwise("loss", 8 * width, 8 * width),
        ),
        output=0,
        saved=(Saved("final norm input", s * h, split=False), Saved("head input", h, split=False)),
    )
    return (first, *blocks, between, *text_blocks, last)

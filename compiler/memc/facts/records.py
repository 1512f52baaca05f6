"""Fact records: what is known of a GPU, a model, a library, each with its source. Frozen; loaded by `memc.facts`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Component(StrEnum):
    """Part of a model that parameters are counted by."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    NORM = "norm"
    HEAD = "head"


class NormKind(StrEnum):
    """How a normalisation is computed, which decides what it keeps for backward.

    `rms`: Llama style, weight * (x in fp32 normalised).to(dtype). `rms_fp32_weight`: Gemma style, (x in fp32
    normalised) * (1 + weight in fp32), cast afterwards. `layer`: torch LayerNorm. `rms_gated`: Qwen's gated norm,
    as `rms`, then times silu(gate in fp32). `none`: there is no norm at this place.
    """

    RMS = "rms"
    RMS_FP32_WEIGHT = "rms_fp32_weight"
    RMS_GATED = "rms_gated"
    LAYER = "layer"
    NONE = "none"


class Objective(StrEnum):
    """What a model is trained for, which decides its head, its loss and what a sample holds.

    `image_text_lm` is a causal LM over text with image features in it; `features` has no head.
    """

    CAUSAL_LM = "causal_lm"
    IMAGE_TEXT_LM = "image_text_lm"
    SEQ2SEQ_LM = "seq2seq_lm"
    SPEECH_SEQ2SEQ_LM = "speech_seq2seq_lm"
    MASKED_LM = "masked_lm"
    CLASSIFICATION = "classification"
    CONTRASTIVE = "contrastive"
    FEATURES = "features"


class Sees(StrEnum):
    """What the positions of a stack stand for: tokens of the (target) text, of the source text, patches, frames."""

    TEXT = "text"
    SOURCE = "source"
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear module of a block, or a convolution that PEFT adapts like one.

    Attributes:
        name: Module name, for example ``q_proj``; what a LoRA target names.
        component: What its parameters are counted under.
        in_features: Input width.
        out_features: Output width.
        bias: Whether it has a bias vector of `out_features`.
        reads: Name of the tensor it reads; linears that read the same tensor share the saved input. One of
            ``attention_input``, ``attention_output``, ``mlp_input``, ``mlp_product`` (or a family's own name).
        path: Module path below the block, where several linears have the same name; empty where the name is enough.
        quantized: Whether transformers loads it in 4 bits when asked to (it leaves out the head, and what a model
            class keeps in fp32).
        adaptable: Whether PEFT puts an adapter on it when asked for its name (for some families it takes the name for
            that of fused experts).
    """

    name: str
    component: Component
    in_features: int
    out_features: int
    bias: bool
    reads: str
    path: str = ""
    quantized: bool = True
    adaptable: bool = True

    @property
    def id(self) -> str:
        """What tells it from the other linears of its block: the path where there is one, else the name."""
        return self.path or self.name

    @property
    def weight_params(self) -> int:
        """Elements of the weight matrix."""
        return self.in_features * self.out_features

    @property
    def params(self) -> int:
        """Elements of weight and bias."""
        return self.weight_params + (self.out_features if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """One normalisation of a block (or the final one).

    Attributes:
        name: Module name, for example ``input_layernorm``.
        kind: How it is computed.
        size: Width that one row is normalised over.
        rows: Rows per token (1 on the residual stream, the number of heads for a per-head q/k norm).
        params: Elements of its weight (and bias).
        feeds: Name of the tensor it writes when a linear reads it (``attention_input``), else empty (a q/k norm, or
            a post-norm whose output only joins the residual stream).
    """

    name: str
    kind: NormKind
    size: int
    rows: int
    params: int
    feeds: str

    @property
    def width(self) -> int:
        """Elements per token that pass through it."""
        return self.size * self.rows


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter that belongs to no linear and no norm: fused experts, a router.

    Attributes:
        name: Its name below its owner, for example ``mlp.experts.down_proj``.
        component: What its elements are counted under.
        params: Elements.
        trains: Whether full training updates it (a table of sinusoids stays as it is).
        fp32: Whether its elements have 4 bytes whatever type the model has.
    """

    name: str
    component: Component
    params: int
    trains: bool = True
    fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """Shape of one attention module.

    Attributes:
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of one head.
        sliding_window: Tokens that one query sees; None when it sees all.
        logit_softcap: Cap on attention logits (forces eager attention in transformers); None without one.
        fused_qkv: Whether one linear produces q, k and v together.
        value_head_dim: Width of one head's values where it differs from `head_dim`; None where it does not.
        causal: Whether a position sees only those before it.
        linear: Whether the cost grows with the length, not with its square (a gated delta rule): `heads` are the
            value heads then, `kv_heads` the key heads.
        rotary: Whether positions enter by rotation of queries and keys.
        eager_only: Whether transformers computes it in no other way than its own matrix products.
        always_masked: Whether a mask reaches the kernel even where none is needed.
        mixed_heads: Whether torch is given more query heads than key heads as they are: no fused kernel takes them.
        within: Positions of the pieces that positions see each other within; None where they see all.
        padded: Whether the mask of a padded batch of texts reaches it.
        made_after_norm: Whether masks and rotary tables have the type of a layer norm's output, fp32 under autocast.
        rotary_kinds: How many pairs of rotary tables the model makes: one for each kind of layers that has its own.
        position_table: Rows of a table of distances that the scores of every layer are made with; 0 without one. Such a
            model hands its layers the table and the distances of all pairs, masks every pair, and keeps what each layer
            gave until all have run.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    logit_softcap: float | None
    fused_qkv: bool
    value_head_dim: int | None = None
    causal: bool = True
    linear: bool = False
    rotary: bool = True
    eager_only: bool = False
    always_masked: bool = False
    mixed_heads: bool = False
    padded: bool = True
    within: int | None = None
    made_after_norm: bool = False
    rotary_kinds: int = 1
    position_table: int = 0

    @property
    def value_width(self) -> int:
        """Width of what attention gives the output projection: heads x the width of a value head."""
        return self.heads * (self.value_head_dim or self.head_dim)

    @property
    def query_width(self) -> int:
        """heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """kv_heads x head_dim."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MlpFacts:
    """Shape of one feed-forward module.

    Attributes:
        intermediate: Inner width.
        gated: Whether act(gate) * up (three matrices) rather than act(up) (two).
        fused_gate_up: Whether one linear produces gate and up together.
        activation: Name of the activation function, as in the config (``silu``, ``gelu_pytorch_tanh``).
        experts: Routed experts, whose inner width is `intermediate`; 0 in a dense layer.
        experts_per_token: Experts that one token is sent to; 0 in a dense layer.
        shared_intermediate: Inner width of the expert that every token passes; 0 without one.
        router_class: Class name of the module that sends tokens to experts; empty in a dense layer.
    """

    intermediate: int
    gated: bool
    fused_gate_up: bool
    activation: str
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    router_class: str = ""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One repeated layer.

    Attributes:
        layer_class: Class name of the layer module (what FSDP wraps).
        linears: In forward order.
        norms: In forward order.
        attention: Its attention.
        mlp: Its feed-forward part.
        tensors: Parameters that are neither linear nor norm; empty in a plain decoder.
        cross_attention: Its attention to another stack's positions; None without one.
        forward: What it computes, as a program (specs/README.md); empty when it is not described.
        sizes: What the names in `forward` stand for: whole numbers, and switches as 0 or 1.
    """

    layer_class: str
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    attention: AttentionFacts
    mlp: MlpFacts
    tensors: tuple[Tensor, ...] = ()
    cross_attention: AttentionFacts | None = None
    forward: str = ""
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def params(self) -> int:
        """Elements of one layer."""
        owners: tuple[Linear | Norm | Tensor, ...] = (*self.linears, *self.norms, *self.tensors)
        return sum(owner.params for owner in owners)

    @property
    def active_params(self) -> int:
        """Elements that one token's forward uses: of the routed experts, those that it is sent to."""
        routed = sum(tensor.params for tensor in self.tensors if tensor.component is Component.EXPERTS)
        if not routed:
            return self.params
        return self.params - routed + routed * self.mlp.experts_per_token // self.mlp.experts

    @property
    def routing_params(self) -> int:
        """Elements of the module that sends tokens to experts: its router, all experts, those that every token passes.

        0 in a dense layer.
        """
        if not self.mlp.experts:
            return 0
        owners: tuple[Linear | Tensor, ...] = (*self.linears, *self.tensors)
        return sum(owner.params for owner in owners if owner.component in (Component.MLP, Component.EXPERTS))


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """`count` layers of the same shape that follow each other."""

    block: Block
    count: int


@dataclass(frozen=True, kw_only=True)
class Patches:
    """How an image of any size is cut into positions.

    Attributes:
        side: Pixels of a patch's side.
        merge: Patches along each side of the square that becomes one position of the text.
        window: Patches along the side of the windows that most layers attend within; 0 without windows.
        most_pixels: Pixels that the model's own processor lets an image have.
    """

    side: int
    merge: int
    window: int
    most_pixels: int


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A run of layers over one kind of positions, with what stands before and after them.

    Attributes:
        name: Module path below the model, for example ``model.vision_tower``; empty for the main stack.
        sees: What its positions stand for.
        hidden_size: Width of its residual stream.
        groups: The layers, in order.
        embedding_params: Elements of what makes its input: tables, a patch convolution, learned positions.
        embedding_norms: Norms between that and the first layer.
        final_norm: Norm after the last layer.
        linears: Linears outside the layers: projections to another stack, a head's transform.
        tensors: Parameters outside the layers that are nothing of the above.
        norms: Norms outside the layers that are nothing of the above.
        positions_per_item: Positions of one image or recording, where the config decides; None where the sample does.
        text_positions_per_item: Positions that one image takes in the main stack; None where the sample decides, 0
            where it takes none.
        input_elements: Elements that the batch holds of one image or recording, or of one patch of images of any size.
        patches: How images of any size become positions; None where all have one size.
        unused_layers: Layers at its end whose output nothing reads.
        before: What runs between the embedding and the layers, as a block of its own; None when nothing does.
        after: What runs after the layers, as a block of its own; None when nothing does, or when the tail of the model
            says it.
    """

    name: str
    sees: Sees
    hidden_size: int
    groups: tuple[BlockGroup, ...]
    embedding_params: int
    embedding_norms: tuple[Norm, ...]
    final_norm: Norm
    linears: tuple[Linear, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    norms: tuple[Norm, ...] = ()
    positions_per_item: int | None = None
    text_positions_per_item: int | None = 0
    input_elements: int = 0
    patches: Patches | None = None
    unused_layers: int = 0
    before: Block | None = None
    after: Block | None = None

    @property
    def num_layers(self) -> int:
        """Layers over all groups."""
        return sum(group.count for group in self.groups)

    @property
    def outer_norms(self) -> tuple[Norm, ...]:
        """All norms outside the layers."""
        return (*self.embedding_norms, self.final_norm, *self.norms)

    @property
    def params(self) -> int:
        """Elements of the stack, a head left out."""
        return sum(self.params_by_component().values())

    def params_by_component(self) -> dict[Component, int]:
        """Returns elements by component, a head left out."""
        counts = dict.fromkeys(Component, 0)
        counts[Component.EMBEDDING] = self.embedding_params
        counts[Component.NORM] = sum(norm.params for norm in self.outer_norms)
        outside: tuple[Linear | Tensor, ...] = (*self.linears, *self.tensors)
        for outer in outside:
            counts[outer.component] += outer.params
        for group in self.groups:
            owners: tuple[Linear | Tensor, ...] = (*group.block.linears, *group.block.tensors)
            for owner in owners:
                counts[owner.component] += owner.params * group.count
            for norm in group.block.norms:
                counts[Component.NORM] += norm.params * group.count
        return counts


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the ledger must know of a model, from its config.json alone.

    `groups`, `hidden_size`, `embedding_params`, `embedding_norms` and `final_norm` are those of the main stack, the one
    that ends in the head.

    Attributes:
        key: The name it was asked by (catalogue id, hub id), or the folder's name.
        model_type: `model_type` of the config.
        architecture: Class that `auto_class` builds.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding; 0 without one.
        groups: The layers, in order.
        final_norm: Norm before the head.
        embedding_params: Elements of the input embedding (and learned position embeddings).
        head_params: Elements of the output head; 0 when it shares the embedding's tensor.
        tied: Whether the head shares the embedding's tensor.
        head_bias: Whether the head has a bias.
        logit_softcap: Cap on the output logits; None without one.
        max_position_embeddings: Longest sequence the config allows; None when unbounded.
        checkpoint_bytes_per_param: Bytes per element of the published weights (2 for bf16).
        checkpoint_dtype: Type of the published weights as torch names it (``bfloat16``).
        checkpoint_quantization: Format of published weights that are quantised, ``mxfp4`` or ``fp8``: they are turned
            into a type that trains while they are read; empty for others.
        gated_hub: Whether the hub asks for an accepted licence; None when unknown.
        source: Where the config comes from.
        checked: ISO date of the check.
        embedding_norms: Norms between the embedding and the first layer; empty in a plain decoder.
        objective: What it is trained for.
        auto_class: The Auto class of transformers that builds it.
        sees: What the positions of the main stack stand for.
        positions_per_item: Positions of one image in the main stack of an image model; None for text.
        input_elements: What the batch holds of one image where the main stack sees images, in elements.
        outer_linears: Linears of the main stack outside its layers; empty in a plain decoder.
        outer_tensors: Further parameters outside the layers; empty in a plain decoder.
        outer_norms: Further norms outside the layers; empty in a plain decoder.
        other_stacks: Stacks that feed the main one or stand beside it, in the order in which they run.
        before: What runs between the embedding and the layers of the main stack, as a block of its own; None when
            nothing does.
        unpriced: Why the ledger's closed forms do not hold for it, as the end of a sentence; empty when they do.
        tail: What comes after the layers, as a program: final norm, head, loss (specs/README.md).
        embedding_dropout: Whether the embedding's output passes through dropout.
        tail_sizes: What the names in `tail` stand for: whole numbers, and switches as 0 or 1.
        tiled_loss: Whether TRL can compute its loss in tiles: for that `base_model` must give what the head reads.
    """

    key: str
    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    groups: tuple[BlockGroup, ...]
    final_norm: Norm
    embedding_params: int
    head_params: int
    tied: bool
    head_bias: bool
    logit_softcap: float | None
    max_position_embeddings: int | None
    checkpoint_bytes_per_param: int
    checkpoint_dtype: str
    gated_hub: bool | None
    source: str
    checked: str
    embedding_norms: tuple[Norm, ...] = ()
    objective: Objective = Objective.CAUSAL_LM
    auto_class: str = "AutoModelForCausalLM"
    sees: Sees = Sees.TEXT
    positions_per_item: int | None = None
    input_elements: int = 0
    outer_linears: tuple[Linear, ...] = ()
    outer_tensors: tuple[Tensor, ...] = ()
    outer_norms: tuple[Norm, ...] = ()
    other_stacks: tuple[Stack, ...] = ()
    before: Block | None = None
    unpriced: str = ""
    tail: str = ""
    embedding_dropout: bool = False
    tail_sizes: tuple[tuple[str, int], ...] = ()
    tiled_loss: bool = True
    checkpoint_quantization: str = ""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks in the order in which they run; the main one is the last."""
        main = Stack(
            name="",
            sees=self.sees,
            hidden_size=self.hidden_size,
            groups=self.groups,
            embedding_params=self.embedding_params,
            embedding_norms=self.embedding_norms,
            final_norm=self.final_norm,
            linears=self.outer_linears,
            tensors=self.outer_tensors,
            norms=self.outer_norms,
            positions_per_item=self.positions_per_item,
            input_elements=self.input_elements,
            before=self.before,
        )
        return (*self.other_stacks, main)

    @property
    def num_layers(self) -> int:
        """Layers of the main stack."""
        return sum(group.count for group in self.groups)

    @property
    def total_params(self) -> int:
        """Unique elements of all stacks; a tied head is counted once."""
        return sum(stack.params for stack in self.stacks) + self.head_params

    @property
    def active_params(self) -> int:
        """Unique elements that one token's forward uses: of routed experts, those that it is sent to."""
        idle = sum(
            (group.block.params - group.block.active_params) * group.count
            for stack in self.stacks
            for group in stack.groups
        )
        return self.total_params - idle

    def params_by_component(self) -> dict[Component, int]:
        """Returns unique elements of all stacks by component; the values add up to `total_params`."""
        counts = dict.fromkeys(Component, 0)
        for stack in self.stacks:
            for component, params in stack.params_by_component().items():
                counts[component] += params
        counts[Component.HEAD] += self.head_params
        return counts

    def linear_modules(self) -> tuple[tuple[Linear, int], ...]:
        """Returns the linears of all stacks, in and outside their layers, each with how many of it there are."""
        found: list[tuple[Linear, int]] = []
        for stack in self.stacks:
            found += [(linear, group.count) for group in stack.groups for linear in group.block.linears]
            found += [(linear, 1) for linear in stack.linears]
        return tuple(found)

    def linear_names(self) -> tuple[str, ...]:
        """Returns the names by which linears of the layers can carry adapters, each once, in forward order."""
        names: dict[str, None] = {}
        for stack in self.stacks:
            for group in stack.groups:
                names.update(dict.fromkeys(linear.name for linear in group.block.linears if linear.adaptable))
        return tuple(names)


@dataclass(frozen=True, kw_only=True)
class MeasuredFigure:
    """One figure over several measurements on a user's own machine.

    Attributes:
        median, minimum, maximum: Of the measurements, in the unit that the figure's name ends with.
        count: How many there are.
    """

    median: float
    minimum: float
    maximum: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on a user's own machine and stands in for the catalogue.

    Attributes:
        origin: Where it stands: ``user facts``, or the hardware file as the spec names it.
        figures: By name (`memc.facts.measured.FIGURES`).
    """

    origin: str
    figures: dict[str, MeasuredFigure]


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What is known of a GPU. None means unknown: a compile that needs the figure stops and names it.

    Attributes:
        key: Catalogue key, for example ``rtx-4090``.
        name: Display name.
        aliases: Other names people use.
        vendor: ``nvidia`` or ``amd``.
        architecture: Generation name.
        compute_capability: (major, minor); None for other vendors.
        capacity_bytes: Memory that torch sees; the smallest value observed on Linux.
        memory_bytes_per_second: Datasheet memory bandwidth.
        achieved_memory_bytes_per_second: Measured memory bandwidth.
        peak_flops_per_second: Dense datasheet rate by precision (``bf16``, ``fp16``, ``tf32``, ``fp32``).
        achieved_flops_per_second: Measured matmul rate by precision.
        pcie_bytes_per_second: One direction.
        nvlink_bytes_per_second: Both directions together, per GPU; 0 when there is none.
        bf16: Whether bf16 matrix units exist.
        flash_attention_2: Whether FlashAttention-2 supports it.
        bitsandbytes: Whether bitsandbytes has kernels for it: 4-bit linears and 8-bit and paged optimizers.
        usd_per_hour: Median cloud price of one GPU.
        purchase_usd: Price of one card.
        source: Sources of the record, joined.
        checked: ISO date of the check.
        achieved_pcie_bytes_per_second: Measured pinned copy rate, the slower direction.
        achieved_allreduce_bytes_per_second: Measured all-reduce bus bandwidth within one node, large payloads.
        multiprocessors: Streaming multiprocessors that torch reports; None when unknown.
        sustained_flops_per_second: Matmul rate under minutes of load by precision; None when not measured.
        board_power_watts: Default power limit of the board; None when unknown.
        calibration: What the user measured, which stands in for the catalogue's; None without.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: tuple[int, int] | None
    capacity_bytes: int | None
    memory_bytes_per_second: float | None
    achieved_memory_bytes_per_second: float | None
    peak_flops_per_second: dict[str, float]
    achieved_flops_per_second: dict[str, float]
    pcie_bytes_per_second: float | None
    nvlink_bytes_per_second: float | None
    bf16: bool
    flash_attention_2: bool
    bitsandbytes: bool
    usd_per_hour: float | None
    purchase_usd: float | None
    source: str
    checked: str
    achieved_pcie_bytes_per_second: float | None = None
    achieved_allreduce_bytes_per_second: float | None = None
    multiprocessors: int | None = None
    sustained_flops_per_second: dict[str, float] | None = None
    board_power_watts: float | None = None
    calibration: Calibration | None = None

    def measured(self, name: str) -> MeasuredFigure | None:
        """Returns a figure that the user measured; None when they did not."""
        return None if self.calibration is None else self.calibration.figures.get(name)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One sourced number about a library or a machine part.

    Attributes:
        key: Dotted: file name and key, for example ``deepspeed.allgather_bucket_elements``.
        value: The number, or a string (a version).
        source: Where it was read or measured.
        checked: ISO date.
    """

    key: str
    value: int | float | str
    source: str
    checked: str

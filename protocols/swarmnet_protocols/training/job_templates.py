"""Templates of job files: one for each method, one for adapters, and one for a model in stages.

They run unchanged on a small standard task.
"""

from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError


@dataclass(frozen=True)
class _Template:
    rounds: int
    settings: str
    learning_rate: str = "1e-3"
    every_rounds: int = 1
    model: str = ""
    tokenizer: str = (
        '"bytes"                    # one token a byte; or the name of a checkpoint with a tokenizer'
    )
    sequence_length: int = 256
    batch_size: int = 8
    stages: str = ""
    method: str = ""
    """The method, if the template has another name."""


_SMALL_LLAMA = """\
# Initialised from the seed. For fine-tuning: checkpoint = "smollm2-135m-instruct", "org/name@REVISION" of the hub, or a directory of yours.
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 6
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 256
tie_word_embeddings = true
"""

_SMOLLM2 = """\
[model]
checkpoint = "smollm2-135m-instruct"   # fine-tuned; or "org/name@REVISION" of the hub, or a directory in Hugging Face layout
"""

_LORA = (
    _SMOLLM2
    + """\
train = "lora"                         # its weights are frozen and stay as their file stores them; workers exchange an adapter
weights = "stored"                     # of 16 and 32 bits: "int8" or "int4" rounds them when they are loaded
rank = 8
alpha = 16
targets = ["q_proj", "v_proj"]         # linear modules with an adapter; without targets, PEFT chooses
"""
)

_TEXT = """\
# A training job. `swarmnet train create FILE` checks and signs it; every worker that joins trains on samples of its own.

[job]
name = "{name}"
seed = 0                               # of the first weights and of the order of the data
{rounds:<39}# exchanges in all

{model}
[data]
format = "text"                        # or "jsonl", "parquet": rows of text, prompt and completion, or messages, as in `tune`; or `field` names the text
path = "python-stdlib"                 # the source of Python's standard library; or a file, a directory or a glob: every worker needs a copy.
                                       # Instead of path: a dataset of the hub, hub = "org/name@REVISION"; or source = "own", and every worker
                                       # trains on files that never leave it. For several sources, a [[data]] each, with its weight
tokenizer = {tokenizer}
sequence_length = {sequence_length}
validation = 0.02                      # share of the documents that is held out

[training]
batch_size = {batch_size}                         # sequences in an inner step of one worker
{microbatch}learning_rate = {learning_rate}
warmup_steps = 50
schedule = "cosine"                    # down to a tenth of the rate; or "constant"
weight_decay = 0.1
# optimizer = "muon"                   # updates hidden matrices by Muon, and the rest by AdamW; needs torch 2.9
betas = [0.9, 0.95]
clip_norm = 1.0

[method]
name = "{method}"
{settings}
[exchange]
# codec = "int8"                       # default: the codec that fits the method
deadline_s = 60                        # a round that is not done by then is discarded
min_workers = 1
max_workers = 16                       # a pass over the data is divided among this many workers
aggregate = "mean"                     # among strangers: "centered-clip" or "median"

[eval]
every_rounds = {every_rounds}
batches = 16
{stages}"""

_MICROBATCH = """\
microbatch = 2                         # sequences that travel together: with more microbatches than stages, all stages compute at once
"""
_STAGES = """
[stages]                               # each worker has one stage of the model, and microbatches travel through all of them
count = 3                              # there must be a worker of each: start `swarmnet train join` three times, each with a --data-dir of its own
cuts = "auto"                          # stages of about equal bytes; or the first block of each stage but the first, such as [1, 3]
codec = "float32"                      # of what travels between stages; "bfloat16", "int8" and "int4" send a half, a quarter and an eighth; with "auto", each link chooses
"""

_DILOCO = """\
sync_every = 50                        # inner steps between exchanges
outer_lr = 0.7
momentum = 0.9
"""

_TEMPLATES = (
    ("allreduce", _Template(1000, "", every_rounds=50)),
    ("diloco", _Template(20, _DILOCO)),
    (
        "streaming",
        _Template(
            100,
            """\
sync_every = 50                        # inner steps between two exchanges of the same fragment
fragments = 5                          # must divide sync_every
overlap_steps = 5                      # inner steps while a fragment is under way
mixing = 0.5                           # share of the worker's own fragment that is kept
outer_lr = 0.4
momentum = 0.9
""",
            every_rounds=5,
        ),
    ),
    ("eager", _Template(20, _DILOCO.replace("0.7", "0.4").replace("0.9", "0.6"))),
    (
        "noloco",
        _Template(
            20,
            """\
sync_every = 50                        # inner steps between exchanges
alpha = 0.8                            # outer momentum
beta = 1.0                             # outer learning rate
gamma = 0.4                            # pull between the replicas; must be less than 2 (1 - alpha^2)
""",
        ),
    ),
    (
        "sparseloco",
        _Template(
            33,
            """\
sync_every = 30                        # inner steps between exchanges
decay = 0.95                           # share of the earlier error that is added to the next contribution
outer_lr = 3.0                         # for eight workers; with M workers, one contribution counts 1/M
""",
        ),
    ),
    (
        "co2",
        _Template(
            125,
            """\
sync_every = 8                         # inner steps between exchanges; an exchange runs meanwhile. With 48, a worker sends a sixth
outer_lr = 0.5                         # slow directions move by 0.4 of a step, hence the larger learning rate above
momentum = 0.3
clip = 1.0                             # largest element of the outer momentum
""",
            learning_rate="3e-3",
            every_rounds=5,
        ),
    ),
    (
        "zo",
        _Template(
            5,
            """\
sync_every = 160                       # steps between exchanges; a worker sends less than 17 bytes a step
epsilon = 1e-3                         # how far along a direction the loss is measured
weights = "bfloat16"                   # or "float32", on processors that are slow with bfloat16
learning_rate = 5e-5                   # replaces the learning rate in [training], which is for inner optimizers
""",
            learning_rate="5e-5",
            model=_SMOLLM2,
            tokenizer='"smollm2-135m-instruct"    # the checkpoint\'s',
            sequence_length=128,
            batch_size=2,
        ),
    ),
    (
        "lora",
        _Template(
            10,
            _DILOCO,
            model=_LORA,
            tokenizer='"smollm2-135m-instruct"    # the checkpoint\'s',
            sequence_length=128,
            batch_size=2,
            method="diloco",
        ),
    ),
    ("pipeline", _Template(1000, "", every_rounds=50, stages=_STAGES, method="allreduce")),
)

TEMPLATES = tuple(name for name, _ in _TEMPLATES)


def template(method: str) -> str:
    """Return a commented job file for the standard task.

    The task trains a byte-level Llama of 1.3 million parameters, or SmolLM2 for ``zo`` and
    ``lora``. Raises ``ConfigError`` for an unknown method.
    """
    chosen = dict(_TEMPLATES).get(method)
    if chosen is None:
        raise ConfigError(f"there is no method {method!r}", hint=f"one of: {', '.join(TEMPLATES)}")
    return _TEXT.format(
        name=f"stdlib-{method}",
        method=chosen.method or method,
        rounds=f"rounds = {chosen.rounds}",
        model=chosen.model or _SMALL_LLAMA,
        tokenizer=chosen.tokenizer,
        sequence_length=chosen.sequence_length,
        batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        settings=chosen.settings,
        every_rounds=chosen.every_rounds,
        stages=chosen.stages,
        microbatch=_MICROBATCH if chosen.stages else "",
    )

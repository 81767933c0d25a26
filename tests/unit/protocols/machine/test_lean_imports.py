"""Lean imports: processes do not load unused parts of libraries that cost memory and time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import resolve
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny, write_gguf

UNWANTED = (
    "PIL",
    "accelerate",
    "hivemind.moe",
    "scipy",
    "sympy",
    "torch._dynamo.eval_frame",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)

HOST = """
import json, sys
from pathlib import Path
sources = set()
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".py"):
        sources.add(str(arguments[0]))
sys.addaudithook(note)
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
import_transformers()
prepare_hivemind()
import torch
import hivemind.p2p
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import resolve

cache_dir, *models = sys.argv[1:]
outputs = {}
for name in models:
    local = resolve(name, cache_dir=Path(cache_dir))
    stage = load_stage(local, 1, 3, dtype=torch.float32, device=torch.device("cpu"))
    [answer] = stage.forward([(stage.new_sequence(), torch.ones(4, local.manifest.hidden_size))])
    outputs[name] = answer.tolist()
print(json.dumps({"outputs": outputs, "modules": sorted(sys.modules), "sources": len(sources)}))
"""

MOST_SOURCES = 500
"""Limit on source files that are read; transformers has 4,000. Without bytecode files, Python also
reads the source of each imported module."""

KEPT = """
import gc
from swarmnet_protocols.machine.lean_imports import import_transformers
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
import_transformers()
assert not full, "what is imported is looked through for garbage meanwhile"
assert gc.isenabled()
assert len(gc.get_objects()) < gc.get_freeze_count() / 10
"""

REST = """
from swarmnet_protocols.machine.lean_imports import import_transformers
import_transformers()
import accelerate, PIL, scipy, torch
assert "eager" in torch._dynamo.list_backends(exclude_tags=())
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, modeling_utils
from transformers.models import llama
assert PreTrainedModel is modeling_utils.PreTrainedModel
assert LlamaForCausalLM is transformers.models.llama.LlamaForCausalLM is llama.modeling_llama.LlamaForCausalLM
assert transformers.models.LlamaConfig is transformers.LlamaConfig
assert not hasattr(transformers, "nonsense") and not hasattr(transformers.models, "nonsense")
import peft
"""

ON_AN_ACCELERATOR = """
import sys
from pathlib import Path
import torch
torch.backends.mps.is_available = lambda: True
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.models import resolve
import_transformers()
local = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))
model = local.load_whole(dtype=torch.float32, device=torch.device("meta"))
assert {each.device.type for each in model.parameters()} == {"meta"}
"""

CLIENT = """
import json, sys
from pathlib import Path
from swarmnet_protocols.machine import lean_imports
from swarmnet_protocols.models import resolve
lean_imports.use()
resolve(sys.argv[1], cache_dir=Path(sys.argv[2])).vocabulary()
print(json.dumps({"modules": sorted(sys.modules)}))
"""

DHT = """
import sys
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
prepare_hivemind()
import swarmnet_protocols.directory.dht.directory, swarmnet_protocols.directory.dht.node, swarmnet_protocols.joining.network
assert "torch" not in sys.modules
from hivemind.dht import DHT
from hivemind.utils import MPFuture
"""


def run(program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "{}")


def test_a_host_of_any_family_starts_without_compiler_and_clusters(tmp_path: Path) -> None:
    models = [str(save_tiny(family, tmp_path / family)) for family in FAMILIES]
    models += [str(write_gguf(tmp_path / "llama.gguf", "llama"))]
    seen = run(HOST, str(tmp_path / "cache"), *models)
    assert not set(UNWANTED) & set(seen["modules"])
    assert seen["sources"] < MOST_SOURCES
    for name in models:
        local = resolve(name, cache_dir=tmp_path / "cache")
        stage = load_stage(local, 1, 3, dtype=torch.float32, device=torch.device("cpu"))
        [answer] = stage.forward([(stage.new_sequence(), torch.ones(4, local.manifest.hidden_size))])
        assert_near(torch.tensor(seen["outputs"][name]), answer)


def test_a_client_reads_a_new_model_without_the_compiler(tmp_path: Path) -> None:
    model, cache_dir = str(write_gguf(tmp_path / "llama.gguf", "llama")), str(tmp_path / "cache")
    assert not set(UNWANTED) & set(run(CLIENT, model, cache_dir)["modules"])
    known = run(CLIENT, model, cache_dir)["modules"]
    assert not {"torch", "transformers"} & set(known)


def test_weights_can_be_placed_on_an_accelerator(tmp_path: Path) -> None:
    """The device ``meta`` stands in for a GPU: transformers places weights on both in one way."""
    run(ON_AN_ACCELERATOR, str(write_gguf(tmp_path / "llama.gguf", "llama")), str(tmp_path / "cache"))


def test_a_peer_that_computes_nothing_goes_without_torch() -> None:
    """A bootstrap node is ready in a second and takes 60 MB. The rest of hivemind can be imported
    afterwards."""
    run(DHT)


def test_imported_objects_are_excluded_from_garbage_collection() -> None:
    run(KEPT)


def test_modules_left_out_can_be_imported_afterwards() -> None:
    run(REST)

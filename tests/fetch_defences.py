"""Defences of weights from the hub and from peers."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet_client.model import local_layers
from swarmnet_node import node
from swarmnet_node.hosting import reports
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.fetching import (
    disk,
    download,
    hedging,
    hub_files,
    hub_ranges,
    peers,
    piece_file,
    pieces,
    server,
)
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import PieceTable, Tables
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import LocalModel, local_model, partial_model, parts, resolve
from swarmnet_protocols.models.checkpoints import (
    model_folder,
    safetensors_file,
)
from swarmnet_protocols.models.checkpoints.gguf import file as gguf_file
from swarmnet_protocols.models.checkpoints.gguf import header as gguf_header
from swarmnet_protocols.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.models.parts import Files, Parts
from tests.defences import Defence, nothing, replacing, yes
from tests.e2e import test_model
from tests.sim import test_published_names, test_training_state_transfer
from tests.support.big_model import save_big
from tests.support.model_hub import ModelHub, model_hub
from tests.support.swarm_lab import load_reference
from tests.support.tiny import VOCABULARY
from tests.support.tiny_swarm import load_tiny, tiny_swarm
from tests.support.weight_swarm import weight_swarm
from tests.unit.models import (
    test_download,
    test_expert_pieces,
    test_file_kinds,
    test_gguf_config,
    test_gguf_parts,
    test_gguf_tokenizer,
    test_inventory,
    test_model_folder,
    test_models_gguf,
    test_parts,
    test_safetensors_completely,
    test_slow_hosts,
    test_weights_from_peers,
)


def limits_the_disk(folder: Path) -> None:
    stored = test_inventory.three_files(folder)
    try:
        disk.make_room(stored, 65536, 3 * 65536)
    except OutOfResources as error:
        raise AssertionError from error
    assert test_inventory.names(stored) == ["1", "2"]


def believes_no_claim(folder: Path) -> None:
    """In a swarm without a pieces hash nothing comes from a peer while the hub answers."""
    big = save_big(folder / "model")
    with model_hub(big, folder / "hf") as hub, weight_swarm() as swarm:
        whole = resolve(str(big), cache_dir=folder / "whole")
        whole.verify()
        test_weights_from_peers.test_without_a_pieces_hash_peers_only_confirm_what_the_hub_sends(
            hub, swarm, whole, folder
        )


class Equal:
    """Equals every hash."""

    def __ne__(self, other: object) -> bool:
        return False


def proves_no_false_table(folder: Path) -> None:
    big = save_big(folder / "model")
    with model_hub(big, folder / "hf") as hub, weight_swarm() as swarm:
        test_weights_from_peers.test_a_false_table_does_not_prove_a_file(hub, swarm, big, folder)


@contextmanager
def lone_file(folder: Path) -> Iterator[tuple[ModelHub, LocalModel]]:
    """As the fixture of the same name in ``test_parts``."""
    yield from inspect.unwrap(test_parts.lone)(folder)


def in_lone_file(test: Callable[[tuple[ModelHub, LocalModel], Path], None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with lone_file(folder) as lone:
            test(lone, folder)

    return run


def trusts_no_hub_alone_with_a_listed_model(folder: Path) -> None:
    in_lone_file(test_parts.test_a_model_that_the_swarm_file_names_is_fetched_whole_without_a_table)(folder)


def gives_no_noted_pieces(folder: Path) -> None:
    with lone_file(folder):
        test_parts.test_pieces_that_only_the_hub_has_confirmed_are_not_given_to_peers(folder)


def reads_no_endless_header(folder: Path) -> None:
    with lone_file(folder) as lone, pytest.MonkeyPatch.context() as patch:
        test_parts.test_a_header_without_an_end_is_refused(lone, folder, patch)


def giving_all(self: Parts, files: Files, *rest: Any, **options: Any) -> None:
    _complete(self, files, *rest, **options)
    self.in_use |= {partial.file.sha256: partial for partial, _ in files}


_complete = Parts._complete


def has_few_pieces(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_expert_pieces.test_a_file_of_too_many_pieces_is_refused(patch)


def has_short_header(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_models_gguf.test_a_header_does_not_go_on_in_the_holes_of_a_file(folder, patch)


def publishes_no_path(folder: Path) -> None:
    reference = load_reference(folder / "model", folder / "cache")
    test_published_names.test_a_model_on_this_machine_is_published_without_its_path(reference)


def compiles_no_such_array(folder: Path) -> None:
    source = folder / "array.c"
    source.write_text("int last(int size) { int array[size]; array[size - 1] = 1; return array[size - 1]; }")
    assert native_code.load(source, folder) is None


def refuses_stray_tokens(folder: Path) -> None:
    with tiny_swarm(load_tiny(folder)) as running:
        test_model.test_a_token_that_the_model_does_not_know_is_refused(running, VOCABULARY)


def always_noting(self: PieceFile, table: PieceTable, edges: Any, **_: Any) -> None:
    _use(self, table, edges, notes=True)


_use = PieceFile.use


FETCHING = (
    Defence(
        "a piece has the hash that was noted of it",
        replacing(PieceFile, "_note", nothing),
        in_lone_file(test_parts.test_a_noted_piece_that_changed_on_disk_is_fetched_again),
    ),
    Defence(
        "the hub alone does not vouch for a model that the swarm file names",
        replacing(SwarmPeers, "lists", lambda *_: False),
        trusts_no_hub_alone_with_a_listed_model,
    ),
    Defence(
        "peers get no noted pieces",
        replacing(Parts, "_complete", giving_all),
        gives_no_noted_pieces,
    ),
    Defence(
        "a redirect away from TLS is refused",
        replacing(hub_ranges, "_check_secure", nothing),
        lambda _: test_download.test_a_redirect_to_an_address_without_tls_is_refused(),
    ),
    Defence(
        "a header has a bounded size",
        replacing(hub_files, "_check_head_size", nothing),
        reads_no_endless_header,
    ),
    Defence(
        "a header arrives in a bounded number of answers",
        replacing(hub_files, "MAX_HEAD_READS", 1 << 20),
        in_lone_file(test_parts.test_a_header_in_answers_of_a_few_bytes_is_given_up),
    ),
    Defence(
        "a file has a bounded number of pieces",
        replacing(pieces, "_check_count", nothing),
        has_few_pieces,
    ),
    Defence(
        "hashes are noted only where no table tells them",
        replacing(PieceFile, "use", always_noting),
        test_download.test_zeros_in_a_table_of_others_are_the_hash_of_no_piece,
    ),
    Defence(
        "what a peer claims is not believed",
        replacing(Tables, "claim", Tables.add),
        believes_no_claim,
    ),
    Defence(
        "a claimed table is known when the whole file has its hash",
        replacing(parts, "hash_pieces", lambda *_: SimpleNamespace(sha256=Equal())),
        proves_no_false_table,
    ),
    Defence(
        "tensors of a gguf file do not overlap",
        replacing(gguf_header, "_check_overlap", nothing),
        lambda folder: test_models_gguf.test_tensors_of_a_gguf_file_do_not_overlap(16, False, folder),
    ),
    Defence(
        "tensors of a gguf file are within it",
        replacing(gguf_header, "_check_within", nothing),
        lambda folder: test_models_gguf.test_tensors_of_a_gguf_file_are_within_it(0, (25,), folder),
    ),
    Defence(
        "the header of a gguf file has an end",
        replacing(gguf_header, "_longest_header", lambda size: size),
        has_short_header,
    ),
    Defence(
        "a model's files are in its folder",
        replacing(model_folder, "is_part_of", yes),
        lambda folder: test_model_folder.test_a_link_to_a_file_outside_the_folder_is_refused(
            "merges.txt", folder
        ),
    ),
    Defence(
        "a model's files without weights have one name on the disk",
        replacing(model_folder, "_check_metadata", nothing),
        test_model_folder.test_a_file_with_another_name_on_the_disk_is_refused,
    ),
    Defence(
        "a model's files without weights are bounded",
        replacing(model_folder, "MAX_METADATA_BYTES", 1 << 40),
        test_model_folder.test_a_file_without_weights_has_a_bounded_size,
    ),
    Defence(
        "a file that was replaced is not served",
        replacing(local_model, "_stamp", lambda _: dict.fromkeys(("modified_ns", "changed_ns"), 0)),
        test_model_folder.test_a_file_that_was_replaced_after_it_was_verified_is_not_served,
    ),
    Defence(
        "a dimension of a tensor is bounded",
        replacing(safetensors_file, "MAX_SIZE", 1 << 48),
        test_model_folder.test_a_dimension_of_a_tensor_is_bounded,
    ),
    Defence(
        "a file that is no model for text is refused by what it is",
        replacing(gguf_file, "check_kind", nothing),
        lambda folder: test_file_kinds.test_a_gguf_file_of_something_else_says_what_it_is(
            "qwen3", test_file_kinds.ONE, {"qwen3__pooling_type": 3}, "embedding model", folder
        ),
    ),
    Defence(
        "a setting of a checkpoint that the class does not read is refused",
        replacing(safetensors_file, "check_settings", nothing),
        lambda folder: test_safetensors_completely.test_a_setting_that_the_class_does_not_read_is_refused(
            "llama", "embedding_multiplier", 2.0, folder
        ),
    ),
    Defence(
        "a tensor beside the language model is refused",
        replacing(safetensors_file, "check_tensors", nothing),
        lambda folder: test_safetensors_completely.test_a_tensor_beside_the_language_model_is_refused(
            "extra.weight", folder
        ),
    ),
    Defence(
        "a block behind the last is refused unless it predicts several tokens",
        replacing(safetensors_file, "check_blocks", nothing),
        test_safetensors_completely.test_blocks_behind_the_last_predict_several_tokens_or_are_refused,
    ),
    Defence(
        "the public name of a model has no path",
        lambda patch: [patch.setattr(each, "name_for_peers", str) for each in (node, reports)],
        publishes_no_path,
    ),
    Defence(
        "C code has no array on the stack whose size is chosen at run time",
        replacing(native_code, "COMPILE", tuple(flag for flag in native_code.COMPILE if "vla" not in flag)),
        compiles_no_such_array,
    ),
    Defence(
        "a key of a gguf file that is not known is refused",
        replacing(gguf_file, "check_keys", nothing),
        lambda folder: test_gguf_config.test_a_key_that_is_not_known_is_refused_by_name(
            "logit_scale", folder
        ),
    ),
    Defence(
        "the tokenizer of a gguf file has no id beyond its vocabulary",
        replacing(gguf_tokenizer, "_check_ids", nothing),
        test_gguf_tokenizer.test_an_id_beyond_the_vocabulary_does_not_leave_a_tokenizer,
    ),
    Defence(
        "a token that the model does not know is refused",
        replacing(local_layers, "_check_ids", nothing),
        refuses_stray_tokens,
    ),
    Defence(
        "every tensor of a gguf file is used",
        replacing(GgufCheckpoint, "check_complete", nothing),
        test_gguf_config.test_a_tensor_that_the_model_does_not_use_is_refused_by_name,
    ),
    Defence(
        "every tensor of a safetensors file is used",
        replacing(partial_model, "UNUSED", re.compile("")),
        lambda folder: test_model_folder.test_a_tensor_that_the_model_does_not_use_is_refused_by_name(
            "model.layers.0.self_attn.q_proj.bias", True, folder
        ),
    ),
    Defence(
        "parts of a split gguf file belong together",
        replacing(gguf_header, "_check_parts", nothing),
        test_gguf_parts.test_parts_of_two_models_are_refused,
    ),
    Defence(
        "a piece is hashed before it is kept",
        replacing(PieceFile, "_matches", yes),
        test_download.test_wrong_bytes_are_not_kept_and_their_source_is_named,
    ),
    Defence(
        "a table of pieces fits its file",
        replacing(PieceTable, "decode", classmethod(lambda cls, data, size: cls(1, data[8:]))),
        lambda _: test_download.test_a_table_that_does_not_fit_its_file_is_refused(b""),
    ),
    Defence(
        "the hub sends the range that was asked for",
        replacing(hub_ranges, "_check_range", nothing),
        lambda _: test_download.test_an_answer_with_another_range_is_refused(
            test_download.answer(206, "bytes 10-19/5")
        ),
    ),
    Defence(
        "a document of a peer is bounded",
        replacing(peers, "_check_size", nothing),
        lambda _: test_download.test_a_document_is_bounded([(1 << 40, bytes(10))]),
    ),
    Defence(
        "a request for weights is bounded",
        replacing(server, "PIECE_BYTES", 1 << 40),
        lambda _: test_download.test_a_request_for_too_much_is_refused(
            test_download.pb.WeightsRequest(
                manifest=bytes(32), what=test_download.pb.WHAT_TABLE, length=test_download.PIECE_BYTES + 1
            )
        ),
    ),
    Defence(
        "a listing counts only with the pieces hash of the swarm file",
        replacing(peers, "listing_hash", lambda _: bytes(32)),
        test_download.test_a_listing_counts_only_if_the_swarm_file_has_its_hash,
    ),
    Defence(
        "weights on disk have a limit",
        replacing(disk.PieceFile, "remove_folder", staticmethod(nothing)),
        limits_the_disk,
    ),
    Defence(
        "a partial file is marked when it has reached the disk",
        replacing(piece_file, "SYNC_BYTES", 0),
        test_download.test_only_pieces_that_reached_the_disk_are_marked,
    ),
    Defence(
        "a host that is slow to answer holds up no newcomer",
        replacing(hedging, "HEDGE_S", 1e6),
        lambda folder: test_slow_hosts.test_hosts_that_send_little_hold_up_no_newcomer(
            test_slow_hosts.drip, folder
        ),
    ),
    Defence(
        "pieces that hosts hold back are asked of others",
        replacing(download, "REPEAT_S", 1e6),
        lambda folder: test_slow_hosts.test_hosts_that_send_little_hold_up_no_newcomer(
            test_slow_hosts.hold, folder
        ),
    ),
    Defence(
        "an answer has a minimum rate",
        replacing(peers, "LATE_S", 1e6),
        lambda _: test_slow_hosts.test_an_answer_has_a_minimum_rate(),
    ),
    Defence(
        "a peer that does not read loses its turn",
        replacing(server, "TURN_S", 1e6),
        lambda _: test_slow_hosts.test_peers_that_do_not_read_keep_no_other_peer_waiting(False),
    ),
    Defence(
        "chunks of a state that a source sends slowly are asked of another",
        replacing(download, "REPEAT_S", 1e6),
        lambda _: test_training_state_transfer.test_chunks_that_a_source_sends_slowly_come_from_another(),
    ),
)

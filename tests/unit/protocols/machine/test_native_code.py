"""Native code is compiled once on each machine, and loaded only if no other user can have changed
it."""

import logging
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet_node.engine.kernels.native_backend import SOURCE, NativeBackend
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine import measured_targets, native_code
from swarmnet_protocols.quantization.products import HEADERS
from tests.defences import defence, replacing
from tests.support.compiled import compiled_backend, sharing_libraries


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Replaces the fixture of all other tests: here code is compiled, as on the machine of a user,
    for one target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_targets, "measure", lambda *_, **__: {})
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with the native code of this machine."""
    path = tmp_path_factory.mktemp("native")
    with sharing_libraries():
        compiled_backend(cache_dir=path)
    return path


def test_code_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: str) -> None:
        raise OSError("compiled again")

    before = sorted((cache / "native").iterdir())
    monkeypatch.setattr(native_code, "_run", fail)
    assert NativeBackend.load(cache) is not None
    assert sorted((cache / "native").iterdir()) == before
    assert [path.suffix for path in before] == [".so"] * 2  # the decode step, and the products


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        ("raise(SIGILL); return 0;", "SIGILL"),
        ("abort();", "SIGABRT"),
        ("return 1;", "computes something else"),
    ],
)
def test_code_that_fails_its_trial_gives_way_to_a_simpler_target(
    trial: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library for the best target fails on this processor; its verdict is not asked for again."""
    best = native_code.Target("best", ("-DBEST",))
    simple = native_code.Target("simple", ("-DSIMPLE",))
    monkeypatch.setattr(native_code, "targets", lambda _: [best, simple])
    source = tmp_path / "code.c"
    source.write_text(f"""
        #include <signal.h>
        #include <stdlib.h>
        #ifdef BEST
        int target(void) {{ return 2; }}
        int trial(void) {{ {trial} }}
        #else
        int target(void) {{ return 1; }}
        int trial(void) {{ return 0; }}
        #endif
    """)
    library = native_code.load(source, tmp_path)
    assert library is not None
    assert library.target() == 1
    assert "code.c is not used for best" in caplog.text
    assert told in caplog.text

    caplog.clear()
    monkeypatch.setattr(subprocess, "run", None)  # a second start compiles and tries nothing
    library = native_code.load(source, tmp_path)
    assert library is not None
    assert library.target() == 1
    assert told in caplog.text


def test_a_library_of_the_wheel_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes its trial before it is used, like one that was compiled here."""
    source, wheel = tmp_path / "code.c", tmp_path / "wheel"
    wheel.mkdir()
    best, simple = native_code.Target("best"), native_code.Target("simple")
    for number, target in enumerate((best, simple)):
        source.write_text(
            f"int target(void) {{ return {number}; }} int trial(void) {{ return {1 - number}; }}"
        )
        library = wheel / native_code.library_name(source, target)
        native_code.compile_library(source, library, target, headers=(), compiler="cc")
    monkeypatch.setattr(native_code, "IN_WHEEL", wheel)
    monkeypatch.setattr(native_code, "targets", lambda _: [best, simple])

    loaded = native_code.load(source, tmp_path, compiler="no-such-compiler")
    assert loaded is not None
    assert loaded.target() == 1
    assert "code.c is not used for best: it computes something else" in caplog.text
    assert native_code.provider("no-such-compiler") == "wheel"


def test_a_cache_may_be_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial runs in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("code.c").write_text("int trial(void) { return 0; }")
    assert native_code.load(Path("code.c"), Path("cache")) is not None


def test_code_without_a_trial_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "code.c"
    source.write_text("int nothing(void) { return 0; }")
    assert native_code.load(source, tmp_path) is None
    assert "undefined symbol: trial" in caplog.text


def test_targets_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    features = " ".join(sorted(native_code.TARGETS["x86_64"][0].features))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    names = {
        features: ["avx512vnni", "avx2", "plain"],
        f"{features} avx_vnni": ["avx512vnni", "avxvnni", "avx2", "plain"],
        features.replace("avx512_vnni", ""): ["avx2", "plain"],
        features.replace("f16c", ""): ["plain"],
        "": ["plain"],
    }
    for found, expected in names.items():
        monkeypatch.setattr(native_code, "_processor", lambda found=found: [f"flags : {found}"])
        assert [each.name for each in native_code.targets()] == expected


def test_a_simpler_target_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in native_code.targets("plain")] == ["plain"]
    monkeypatch.setitem(native_code._CHOSEN, "target", "plain")
    assert [each.name for each in native_code.targets()] == ["plain"]
    native_code.choose_target("mmx")
    with pytest.raises(ConfigError, match=r"no target mmx on this machine: it has .*plain"):
        native_code.targets()


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    source = tmp_path / "code.c"
    source.write_text("int trial(void) { return 0; }")
    assert native_code.load(source, tmp_path) is not None
    (library,) = (tmp_path / "native").glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has loaded that file
    library.write_bytes(whole + b"\0")  # the system would load it all the same
    assert native_code.load(source, tmp_path) is not None
    assert [each.read_bytes() for each in (tmp_path / "native").glob("*.so")] == [whole]


@defence(
    "C code has no array on the stack whose size is chosen at run time",
    off=replacing(native_code, "COMPILE", tuple(flag for flag in native_code.COMPILE if "vla" not in flag)),
)
def test_code_has_no_variable_length_array_on_the_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "array.c"
    source.write_text(
        "int last(int size) { int array[size]; array[size - 1] = 1; return array[size - 1]; }"
        "int trial(void) { return last(2) - 1; }"
    )
    assert native_code.load(source, tmp_path) is None
    assert "vla" in caplog.text


def test_a_write_beyond_an_array_on_the_stack_ends_the_process(cache: Path) -> None:
    for library in (cache / "native").glob("*.so"):
        assert b"__stack_chk_fail" in library.read_bytes()


def test_other_flags_make_other_code(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_code, "COMPILE", (*native_code.COMPILE, "-fno-such-flag"))
    assert NativeBackend.load(cache) is None
    assert "no-such-flag" in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_none(
    compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if compiler == "false" and shutil.which("false") is None:
        pytest.skip("no program that fails")
    with caplog.at_level(logging.WARNING):
        assert native_code.load(SOURCE, tmp_path, headers=HEADERS, compiler=compiler) is None
    assert caplog.text.count("without native code") == 1
    assert list(tmp_path.rglob("*.so")) == []


def test_code_that_others_may_have_written_is_not_loaded(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    assert native_code.load(SOURCE, tmp_path, headers=HEADERS) is None
    assert "others can write" in caplog.text


def test_the_threads_are_those_of_torch(cache: Path) -> None:
    """A second OpenMP library would start its own threads."""
    loaded = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line
    }
    assert loaded == {str(native_code.openmp_of_torch().resolve())}

"""A pytest plugin: compiles the C code with AddressSanitizer and UBSan, which end the tests at
their first report. `make sanitized` uses it.

A test that is skipped because nothing was compiled fails here.
"""

from collections.abc import Generator

import pytest

from swarmnet_protocols.machine import native_code

_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")

# Lines are enough for a report. To follow variables through unrolled loops would take minutes.
native_code.COMPILE = (*(flag for flag in native_code.COMPILE if flag != "-O3"), "-O1", "-g1", *_SANITIZERS)
native_code.LINK = (*native_code.LINK, *_SANITIZERS)
native_code.COMPILER_TIMEOUT_S = 600.0
native_code.TRIAL_TIMEOUT_S = 120.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and "no compiler" in str(report.longrepr):
        report.outcome = "failed"
    return report

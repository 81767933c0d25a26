"""One target under atheris, in a process of its own: ``python -m tests.fuzz.one TARGET [flags of
libFuzzer] CORPUS``."""

import signal
import sys

import atheris

with atheris.instrument_imports(
    include=["swarmnet", "swarmnet_node", "swarmnet_client", "swarmnet_protocols"]
):
    from tests.fuzz.targets import PLANTED, TARGETS, believe_signatures


def main() -> None:
    """Fuzz the target. The process ends with libFuzzer: this does not return."""
    name = sys.argv.pop(1)
    target = (TARGETS | PLANTED)[name]
    believe_signatures(setattr)

    def read(data: bytes) -> None:
        try:
            target.read(data)
        except target.refusals:
            return
        except BaseException:
            # libFuzzer's timer for one input runs on: on a busy machine it would end the process
            # before the input is written.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


main()

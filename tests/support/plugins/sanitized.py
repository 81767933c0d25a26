"""A pytest plugin: compiles the C code with AddressSanitizer and UBSan, which end the tests at
their first report. `make sanitized` uses it."""

from swarmnet_protocols.machine import native_code

_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")

native_code.COMPILE = (*(flag for flag in native_code.COMPILE if flag != "-O3"), "-O2", "-g", *_SANITIZERS)
native_code.LINK = (*native_code.LINK, *_SANITIZERS)

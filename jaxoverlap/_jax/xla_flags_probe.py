"""Print the options that the installed XLA reads from lines of XLA_FLAGS; run as a script.

XLA reads XLA_FLAGS once in a process, and ends the process if it does not like them. So each line
of flags is read by a fork of this process, which JAX has not started any threads in. A list of
lines comes as JSON on stdin; for each, a list [text, log] goes to stdout: all of XLA's options and
their values as XLA prints them, or nothing if XLA ended the process, and what it wrote to its log.
It needs nothing but jaxlib, so that it runs with versions of jaxlib that this package does not.
"""

import json
import os
import sys
import tempfile

from jaxlib import xla_client


def asked(line: str) -> tuple[str, str]:
    """XLA's options under a line of flags, and its log."""
    with tempfile.TemporaryFile("w+") as text, tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if not child:
            os.dup2(log.fileno(), sys.stderr.fileno())
            os.environ["XLA_FLAGS"] = line
            text.write(debug_options())
            text.flush()
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        text.seek(0)
        log.seek(0)
        return ("" if ended else text.read()), log.read()


def debug_options() -> str:
    """XLA's DebugOptions, a line a field; its first line, which is none, is left out."""
    options = xla_client.CompileOptions()  # its parts point into it: it has to outlive them
    build = options.executable_build_options
    return "\n".join(
        line for line in str(build.debug_options).splitlines() if "goo.gle" not in line
    )


if __name__ == "__main__":
    print(json.dumps([asked(line) for line in json.load(sys.stdin)]))

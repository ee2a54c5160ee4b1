"""What native code says of modules that are only partitioned does not reach the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from jaxoverlap._util.stderr import lines_without


def test_lines_with_the_text_are_dropped_and_others_come_through(capfd):
    with lines_without("candidate_4"):
        os.write(2, b"W1125 full rematerialization of candidate_4\nW1125 of the step\nhalf a line")
    os.write(2, b", and behind it\n")
    assert capfd.readouterr().err == "W1125 of the step\nhalf a line\n, and behind it\n"


def test_threads_give_the_descriptor_back_as_they_found_it(capfd):
    def write(n: int) -> None:
        with lines_without("dropped"):
            os.write(2, b"dropped\nkept %d\n" % n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"after\n")
    own = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("kept", "af"))]
    assert sorted(own[:-1]) == [f"kept {n}" for n in range(8)] and own[-1] == "after"


def test_the_last_words_of_a_process_that_aborts_come_through():
    program = (
        "import os\nfrom jaxoverlap._util.stderr import lines_without\n"
        "with lines_without('dropped'):\n"
        "    os.write(2, b'dropped\\nF1125 Check failed: dims\\n')\n    os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode < 0 and done.stderr == "F1125 Check failed: dims\n"


def test_a_process_without_stderr_is_left_as_it_is():
    program = (
        "import os\nfrom jaxoverlap._util.stderr import lines_without\nos.close(2)\n"
        "with lines_without('dropped'):\n    print('ran')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")

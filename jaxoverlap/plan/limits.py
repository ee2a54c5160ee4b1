"""The thresholds by which the search keeps or drops a candidate, each with the figure behind it.

Shares are of the step's seconds or bytes; estimates are of XLA's partitioned program.
"""

# -- how much faster an estimate has to be ---------------------------------------------------------

# Estimates that differ by less than this do not tell two candidates apart.
GAIN = 0.01
# A smaller gain is no reason to go on from another layout.
LAYOUT_STEP = 0.002
# Where kernels wait for collectives for more than this share of the step, neighbours of the first
# layouts are tried even if these gain nothing: of benchmarks/written, 30 -> 6 ms at 85%.
MOSTLY_WAITS = 0.5
# Rings seldom make up for a layout that takes more than this many times the best one's seconds.
RIVAL_LAYOUT = 1.15
# Unrolling scans has to gain this, as it needs more memory. By simulation a MaxText step with an
# estimated gain of 0.78% took 1.6% longer, and a 7B step with 0.91% was faster.
UNROLL_GAIN = 0.008
# Sums that leave their scan have to gain this: they move as many bytes, and need no more memory.
LATE_SUMS_GAIN = 0.002
# A second communication stream has to gain this, as NCCL then has two orders.
STREAM_GAIN = 0.01

# -- how much memory a candidate may need ----------------------------------------------------------

# The share of a device's memory above which XLA rematerializes values.
XLA_MEMORY_SHARE = 0.8
# A layout may need this many times the memory of the step without pins.
LAYOUT_MEMORY = 1.05
# More is no reason against a candidate if it is this share of a device's memory: small steps.
SMALL_MEMORY = 0.005
# The share of a step in which kernels wait for lookups, from which on these are pinned.
LOOKUP_WAITS = 0.02
# A split step may need this many times the memory of the original step.
SPLIT_MEMORY = 1.15
# Unrolled scans need up to this many times the memory that is estimated for them.
UNROLLED_MEMORY = 1.3
# Where memory is short, a step whose weights are gathered a layer ahead may need this many times
# the memory of the original step.
LAYERS_AHEAD_MEMORY = 1.05
# A tuned plan may need this many times the memory of the compiled original step.
TUNED_MEMORY = 1.15

# -- what is compiled ------------------------------------------------------------------------------

# If the overlapped step's estimated gain exceeds this share, the original step in the scheduler
# pass's order is not compiled. In `benchmarks.drawn` that order alone gains up to 39%, and one step
# lost 4.5% to it although its estimated gain was 22%.
CLEAR_GAIN = 0.5
# If the estimates with and without a batch split differ by less than this share, both are compiled.
# The estimate was wrong by 2.4% for one of 60 random steps, and by 3% and 6% for third-party steps.
CLOSE_ESTIMATES = 0.06
# The same for split scans whose bodies are unrolled or not. By simulation a MaxText step with an
# estimated gain of 0.78% took 1.6% longer unrolled, a 70B step with one of 0.52% took 3.6% less.
CLOSE_UNROLLED = 0.015
# Published options hide collectives and do not make kernels faster: if a step takes at most this
# share more than the original step's kernels, no published options are compiled.
EXPOSED = 0.05
# By estimate, which knows little of the order: where as much is left, they are compiled at once.
CLEARLY_EXPOSED = 0.15
# Gathers outside of loops, from as many on, are joined up to these times the bytes that cross the
# link in a gather's latency: 2 and 4 took 5% off a step of eight unrolled layers, FSDP over 64
# GB200s (benchmarks.explicit), and 2% over 64 H100s; 2 was best on the first, 4 on the second.
LEAST_JOINED, JOINED_FOR_LATENCIES = 8, (2, 4)
# A tuner's move on which the best estimate gains more than this is not compiled; nor is a whole
# plan, whose estimates err more against each other.
SLOWER_MOVE, SLOWER_PLAN = 0.01, 0.05
# A tuner leaves alone what waits for less than this share of the step.
WORTH_MOVING = 0.002

# The user is told how a step is written if that loses more than this share of its seconds.
MUCH_LOST = 0.2

# -- how many candidates ---------------------------------------------------------------------------

# Ring candidates that are estimated for a step that is behind another by more than
# CLOSE_ESTIMATES: they seldom make up for that.
FEW_CANDIDATES = 5
# Chunks of an exchange that are tried: of about equal ones the fewest are taken.
EXCHANGE_CHUNKS = (2, 4)
# Iterations of a split scan per loop body: that hides what is exposed at the ends of an iteration.
UNROLL = 2
# The equations that the questions about layouts may have in all: a question takes the longer the
# more a step has, 0.5 s for a 7B step of 530. These are for about 5, 30 and, twice, 50 seconds.
# Seconds themselves would differ between processes.
LAYOUT_EQUATIONS = {"repair": 5_000, "complete": 30_000, "advise": 50_000}
# Layouts that are held against each other with rings.
RIVAL_LAYOUTS = {"repair": 2, "complete": 3, "advise": 3}
# The user is told of weights that every device stores if they take more of its memory than this.
MUCH_MEMORY = 0.1

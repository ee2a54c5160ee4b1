"""Train a small GPT with a sharded sequence and an overlapped step.

python -m models.train_long                 # 100 steps on 8 devices, simulated on a CPU
python -m models.train_long --plain         # the same without overlap
python -m models.train_long --varlen        # on documents of their own lengths, balanced
"""

from models.long_context import RECIPE
from models.trainer import command_line

app = command_line(RECIPE, "Train a small GPT whose sequence is split over devices.")

if __name__ == "__main__":
    app()

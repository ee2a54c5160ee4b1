"""Train a small mixture-of-experts GPT on bytes of text, with an overlapped step.

python -m models.train_moe                 # 100 steps on 8 devices, simulated on a CPU
python -m models.train_moe --plain         # the same without overlap
"""

from models.moe import RECIPE
from models.trainer import command_line

app = command_line(RECIPE, "Train a small mixture-of-experts GPT on bytes of text.")

if __name__ == "__main__":
    app()

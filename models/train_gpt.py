"""Train a small GPT on bytes of text, with an overlapped step.

python -m models.train_gpt                 # 100 steps on 8 devices, simulated on a CPU
python -m models.train_gpt --plain         # the same without overlap
python -m models.demo                      # both, compared
"""

from models.gpt import RECIPE
from models.trainer import command_line

app = command_line(RECIPE, "Train a small GPT on bytes of text, its step overlapped.")

if __name__ == "__main__":
    app()

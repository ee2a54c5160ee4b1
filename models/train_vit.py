"""Train a small vision transformer to read digits, with an overlapped step.

python -m models.train_vit                 # 100 steps on 8 devices, simulated on a CPU
python -m models.train_vit --plain         # the same without overlap
"""

from models.trainer import command_line
from models.vit import RECIPE

app = command_line(RECIPE, "Train a small vision transformer to read digits.")

if __name__ == "__main__":
    app()

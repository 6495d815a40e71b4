import sys
from pathlib import Path

# The tests' oracle is the definition here too; pytest puts its folder on the path in the same way.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

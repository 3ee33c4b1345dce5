"""The doctor: ``python -m transformer_plugin`` says whether this installation is right."""

import sys

from transformer_plugin.doctor.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

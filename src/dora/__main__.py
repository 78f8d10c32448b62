"""`python -m dora` is the command `dora`.

For machines on which the console script is not on the path.
"""

from dora.cli.main import main

if __name__ == "__main__":
    main()

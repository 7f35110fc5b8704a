"""`python -m sparsekv` is `sparsekv`."""

from sparsekv.cli import main

if __name__ == "__main__":
    main()

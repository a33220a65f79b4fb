"""Every measurement of speed: `make bench`."""

from tests.benchmarks import overhead

if __name__ == "__main__":
    overhead.main()

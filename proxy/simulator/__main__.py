"""``python -m proxy.simulator``: one simulated replica."""

from proxy.simulator.process import main

if __name__ == "__main__":
    main()

"""Deterministic simulation of a fleet: three servers, clients and faults in one thread, on a virtual clock.

The fleet, its clients' code and the encoding of messages are the real ones. Simulated are the clock, the threads
(`scheduler.py`), the network (`network.py`) and the servers (`server.py`). `oracle.py` knows what a fleet promises,
`workload.py` draws what clients do and what goes wrong, and `run.py` puts one run together from one integer.

    PYTHONPATH=clients/python/tests python -m simulation --seconds 60 --seed 1
"""

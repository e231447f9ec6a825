"""Tests of the example that this project began with: delete this folder when you replace any of its files.

What any model and data must keep is in tests/test_contract.py and tests/test_parity.py, which stay.
"""

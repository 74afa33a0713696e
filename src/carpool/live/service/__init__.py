"""The live service: parts that `open_service` builds and hands to each other. `driver.py` shows how they interact."""

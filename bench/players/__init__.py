"""Programs that play rounds of FedAvg, each in a process of its own."""

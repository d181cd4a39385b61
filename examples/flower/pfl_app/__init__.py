"""A Flower app that trains a personalized model for each client."""

"""Forecasts of training runs on hardware that data sheets describe, and the search for the best layout."""

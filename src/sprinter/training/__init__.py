"""The gate laboratory: label texts, train heads on the labels, judge them."""

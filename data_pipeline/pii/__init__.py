"""Personal data: find e-mail addresses, IP addresses and telephone numbers in linear time, and replace them."""

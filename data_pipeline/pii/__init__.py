"""E-mail addresses, IP addresses and telephone numbers: found in linear time, replaced by what follows from them."""

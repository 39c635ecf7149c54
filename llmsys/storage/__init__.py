"""Files and folders, local and in object stores: paths, atomic writes, locks, caches."""

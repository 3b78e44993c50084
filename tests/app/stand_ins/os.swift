// The part of os on iOS that the core uses.

// os/proc.h
public func os_proc_available_memory() -> Int { 0 }

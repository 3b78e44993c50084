// What the core uses of os on iOS.

// os/proc.h
public func os_proc_available_memory() -> Int { 0 }

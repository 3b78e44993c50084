// What the core uses of os on iOS.

public func os_proc_available_memory() -> Int { 0 }

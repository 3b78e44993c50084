// The views use the public declarations of these modules through this module.
@_exported import MeSP
@_exported import MeSPBundle
@_exported import MeSPControl
@_exported import MeSPCore
@_exported import MeSPDownload
@_exported import MeSPSelfCheck
@_exported import MeSPSentences

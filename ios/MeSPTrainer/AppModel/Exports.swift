// What the views show of these modules is public, and comes with this module. All else of them is the package's own.
@_exported import MeSP
@_exported import MeSPBundle
@_exported import MeSPControl
@_exported import MeSPCore
@_exported import MeSPDownload
@_exported import MeSPSelfCheck
@_exported import MeSPSentences

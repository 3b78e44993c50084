// Lets the views import only this module.
@_exported import MeSP
@_exported import MeSPBundle
@_exported import MeSPControl
@_exported import MeSPCore
@_exported import MeSPDownload
@_exported import MeSPSelfCheck
@_exported import MeSPSentences

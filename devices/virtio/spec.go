package virtio

// Device types (virtio 1.2, section 5).
const (
	DeviceNet     uint32 = 1
	DeviceBlock   uint32 = 2
	DeviceEntropy uint32 = 4
	DeviceBalloon uint32 = 5
	DeviceVsock   uint32 = 19
)

// Feature bits that belong to the transport and the queues (section 6). The
// transport offers exactly these beside a device's own bits 0 to 23.
const (
	FeatureIndirectDescriptors uint64 = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	FeatureEventIndex          uint64 = 1 << 29 // VIRTIO_F_EVENT_IDX
	FeatureVersion1            uint64 = 1 << 32 // VIRTIO_F_VERSION_1

	transportFeatures = FeatureIndirectDescriptors | FeatureEventIndex | FeatureVersion1
	deviceFeatureMask = 1<<24 - 1
)

// Device status bits (section 2.1).
const (
	StatusAcknowledge uint32 = 1
	StatusDriver      uint32 = 2
	StatusDriverOK    uint32 = 4
	StatusFeaturesOK  uint32 = 8
	StatusNeedsReset  uint32 = 64
	StatusFailed      uint32 = 128
)

// Interrupt reasons, the bits of InterruptStatus (section 4.2.2).
const (
	InterruptUsedBuffer   uint32 = 1
	InterruptConfigChange uint32 = 2
)

// WindowSize is how many bytes of guest-physical address space one transport
// answers for.
const WindowSize = 0x1000

// Register offsets of virtio-mmio version 2 (section 4.2.2, table 4.1). All
// registers are 32 bits wide, little endian.
const (
	RegMagicValue        = 0x000
	RegVersion           = 0x004
	RegDeviceID          = 0x008
	RegVendorID          = 0x00c
	RegDeviceFeatures    = 0x010
	RegDeviceFeaturesSel = 0x014
	RegDriverFeatures    = 0x020
	RegDriverFeaturesSel = 0x024
	RegQueueSel          = 0x030
	RegQueueNumMax       = 0x034
	RegQueueNum          = 0x038
	RegQueueReady        = 0x044
	RegQueueNotify       = 0x050
	RegInterruptStatus   = 0x060
	RegInterruptACK      = 0x064
	RegStatus            = 0x070
	RegQueueDescLow      = 0x080
	RegQueueDescHigh     = 0x084
	RegQueueDriverLow    = 0x090
	RegQueueDriverHigh   = 0x094
	RegQueueDeviceLow    = 0x0a0
	RegQueueDeviceHigh   = 0x0a4
	RegSHMSel            = 0x0ac
	RegSHMLenLow         = 0x0b0
	RegSHMLenHigh        = 0x0b4
	RegSHMBaseLow        = 0x0b8
	RegSHMBaseHigh       = 0x0bc
	RegConfigGeneration  = 0x0fc
	RegConfig            = 0x100
)

const (
	magicValue  = 0x74726976 // "virt"
	mmioVersion = 2
	vendorID    = 0x4d564b46 // "FKVM"
)

// Descriptor flags (section 2.7.5).
const (
	DescriptorNext     uint16 = 1
	DescriptorWrite    uint16 = 2
	DescriptorIndirect uint16 = 4
)

// Layout of the three parts of a split queue (section 2.7). Both rings begin
// with 16 bits of flags and 16 bits of index.
const (
	DescriptorSize = 16
	usedElemSize   = 8
	ringFlags      = 0
	ringIndex      = 2
	ringEntries    = 4

	// availNoInterrupt is VIRTQ_AVAIL_F_NO_INTERRUPT, usedNoNotify is
	// VIRTQ_USED_F_NO_NOTIFY; both only count without the event index.
	availNoInterrupt uint16 = 1
	usedNoNotify     uint16 = 1

	// MaxQueueSize is the largest size that the format allows.
	MaxQueueSize = 32768
)

// DriverRingSize returns the bytes of the available ring of a queue of n
// entries, used_event included.
func DriverRingSize(n uint16) uint64 { return ringEntries + 2*uint64(n) + 2 }

// DeviceRingSize returns the bytes of the used ring of a queue of n entries,
// avail_event included.
func DeviceRingSize(n uint16) uint64 { return ringEntries + usedElemSize*uint64(n) + 2 }

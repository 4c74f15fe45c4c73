package nic

import "encoding/binary"

// Feature bits (section 5.1.3).
const (
	FeatureChecksum         uint64 = 1 << 0 // VIRTIO_NET_F_CSUM
	FeatureGuestChecksum    uint64 = 1 << 1
	FeatureMTU              uint64 = 1 << 3
	FeatureMAC              uint64 = 1 << 5
	FeatureGuestTSO4        uint64 = 1 << 7
	FeatureGuestTSO6        uint64 = 1 << 8
	FeatureHostTSO4         uint64 = 1 << 11
	FeatureHostTSO6         uint64 = 1 << 12
	FeatureMergeableBuffers uint64 = 1 << 15 // VIRTIO_NET_F_MRG_RXBUF
	FeatureStatus           uint64 = 1 << 16

	features = FeatureChecksum | FeatureGuestChecksum | FeatureMTU | FeatureMAC | FeatureGuestTSO4 | FeatureGuestTSO6 |
		FeatureHostTSO4 | FeatureHostTSO6 | FeatureMergeableBuffers | FeatureStatus
)

// Header flags and segmentation types (section 5.1.6).
const (
	headerNeedsChecksum = 1
	headerDataValid     = 2

	segmentNone  = 0
	segmentTCPv4 = 1
	segmentTCPv6 = 4
)

const (
	// headerSize is that of struct virtio_net_hdr: with VERSION_1 it always has num_buffers.
	headerSize = 12

	ethernetHeader = 14
	vlanTag        = 4
	// maxFrame is the largest frame, one that is to be segmented: the largest IP packet behind its headers.
	maxFrame = ethernetHeader + vlanTag + 65535

	statusLinkUp = 1
)

// space lays out struct virtio_net_config (section 5.1.4).
func space(mac MAC, mtu int) []byte {
	b := make([]byte, 12)
	copy(b, mac[:])
	le := binary.LittleEndian
	le.PutUint16(b[6:], statusLinkUp)
	le.PutUint16(b[8:], 1) // pairs of queues; means nothing without VIRTIO_NET_F_MQ
	le.PutUint16(b[10:], uint16(mtu))
	return b
}

// header is struct virtio_net_hdr.
type header struct {
	flags          uint8
	segmentation   uint8
	headerLength   uint16
	segmentSize    uint16
	checksumStart  uint16
	checksumOffset uint16
	buffers        uint16
}

func (h *header) decode(b []byte) {
	le := binary.LittleEndian
	h.flags, h.segmentation = b[0], b[1]
	h.headerLength, h.segmentSize = le.Uint16(b[2:]), le.Uint16(b[4:])
	h.checksumStart, h.checksumOffset = le.Uint16(b[6:]), le.Uint16(b[8:])
	h.buffers = le.Uint16(b[10:])
}

func (h *header) encode(b []byte) {
	le := binary.LittleEndian
	b[0], b[1] = h.flags, h.segmentation
	le.PutUint16(b[2:], h.headerLength)
	le.PutUint16(b[4:], h.segmentSize)
	le.PutUint16(b[6:], h.checksumStart)
	le.PutUint16(b[8:], h.checksumOffset)
	le.PutUint16(b[10:], h.buffers)
}

// header says what is to be done to a frame.
func (f *Frame) header() (h header) {
	if f.NeedsChecksum {
		h.flags, h.checksumStart, h.checksumOffset = headerNeedsChecksum, f.ChecksumStart, f.ChecksumOffset
	}
	switch f.Segmentation {
	case TCPv4:
		h.segmentation = segmentTCPv4
	case TCPv6:
		h.segmentation = segmentTCPv6
	}
	h.segmentSize, h.headerLength = f.SegmentSize, f.HeaderLength
	return h
}

// HeaderSize is that of the header before a frame, for whoever passes it on.
const HeaderSize = headerSize

// MaxFrame is the largest frame.
const MaxFrame = maxFrame

// WriteHeader writes what is to be done to a frame as struct virtio_net_hdr.
func (f *Frame) WriteHeader(b *[HeaderSize]byte) {
	h := f.header()
	h.encode(b[:])
}

// ReadFrame reads what WriteHeader has written, and the frame behind it. It is false for what no Frame can say.
func ReadFrame(b []byte) (f Frame, ok bool) {
	if len(b) < headerSize+ethernetHeader {
		return f, false
	}
	var h header
	h.decode(b[:headerSize])
	f.Data = b[headerSize:]
	if h.flags&headerNeedsChecksum != 0 {
		f.NeedsChecksum, f.ChecksumStart, f.ChecksumOffset = true, h.checksumStart, h.checksumOffset
		if int(f.ChecksumStart)+int(f.ChecksumOffset)+2 > len(f.Data) {
			return f, false
		}
	}
	switch h.segmentation {
	case segmentNone:
		return f, true
	case segmentTCPv4:
		f.Segmentation = TCPv4
	case segmentTCPv6:
		f.Segmentation = TCPv6
	default:
		return f, false
	}
	f.SegmentSize, f.HeaderLength = h.segmentSize, h.headerLength
	return f, f.NeedsChecksum && f.SegmentSize > 0 && int(f.HeaderLength) <= len(f.Data)
}

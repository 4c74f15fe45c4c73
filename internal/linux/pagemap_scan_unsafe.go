package linux

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageRegion is struct page_region of linux/fs.h.
type pageRegion struct {
	start, end uint64
	categories uint64
}

// pmScanArg is struct pm_scan_arg of linux/fs.h, an ABI of Linux 6.7.
type pmScanArg struct {
	size              uint64
	flags             uint64
	start, end        uint64
	walkEnd           uint64
	vec, vecLen       uint64
	maxPages          uint64
	categoryInverted  uint64
	categoryMask      uint64
	categoryAnyOfMask uint64
	returnMask        uint64
}

// pagemapScan is PAGEMAP_SCAN: _IOWR('f', 16, struct pm_scan_arg).
const pagemapScan = 3<<30 | unsafe.Sizeof(pmScanArg{})<<16 | 'f'<<8 | 16

// Page categories of PAGEMAP_SCAN.
const (
	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
	pageIsPFNZero = 1 << 5
)

// ScanPrivate finds, in [start, end), the pages that this process owns alone
// because it wrote them: in memory or swapped out, neither part of a file nor
// the kernel's page of zeros. It calls found with ascending ranges; neighbours
// may touch. A kernel before 6.7 answers ENOTTY (or EINVAL).
func (p *Pagemap) ScanPrivate(start, end uint64, found func(AddressRange)) error {
	return p.scanFor(pmScanArg{
		categoryInverted:  pageIsFile | pageIsPFNZero,
		categoryMask:      pageIsFile | pageIsPFNZero,
		categoryAnyOfMask: pageIsPresent | pageIsSwapped,
		returnMask:        pageIsPresent | pageIsSwapped,
	}, start, end, found)
}

// ScanFile finds the pages that are mapped and a file's, as ScanPrivate does. The
// kernel maps some more than were touched.
func (p *Pagemap) ScanFile(start, end uint64, found func(AddressRange)) error {
	return p.scanFor(pmScanArg{
		categoryMask: pageIsFile | pageIsPresent,
		returnMask:   pageIsPresent,
	}, start, end, found)
}

// scanFor finds the pages of the categories that arg says.
func (p *Pagemap) scanFor(arg pmScanArg, start, end uint64, found func(AddressRange)) error {
	if p.regions == nil {
		p.regions = make([]pageRegion, 1024)
	}
	regions := p.regions
	for start < end {
		arg.start, arg.end, arg.walkEnd = start, end, 0
		arg.vecLen = uint64(len(regions))
		n, err := p.scan(&arg, regions)
		if err != nil {
			return fmt.Errorf("scan page map (%#x-%#x): %w", start, end, err)
		}
		for _, r := range regions[:n] {
			found(AddressRange{Start: r.start, End: r.end})
			start = r.end
		}
		if n < len(regions) {
			return nil
		}
		// The kernel gathers 512 regions at a time. walk_end is where such a
		// batch last had to stop for want of room, which is before the last
		// region if a later batch came to the end of the range. So it says
		// neither that the scan is complete nor, alone, where to go on.
		start = max(start, arg.walkEnd)
	}
	return nil
}

// scan makes one call. The kernel gets the address of regions as an integer,
// so they are pinned until it has returned; arg stays alive as a pointer
// argument of the call itself.
func (p *Pagemap) scan(arg *pmScanArg, regions []pageRegion) (int, error) {
	var pin runtime.Pinner
	pin.Pin(&regions[0])
	defer pin.Unpin()
	arg.size = uint64(unsafe.Sizeof(*arg))
	arg.vec = uint64(uintptr(unsafe.Pointer(&regions[0])))
	fd := p.file.Fd()
	defer runtime.KeepAlive(p.file)
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, pagemapScan, uintptr(unsafe.Pointer(arg)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR: // nothing is changed by a scan without write protection
		default:
			return 0, errno
		}
	}
}

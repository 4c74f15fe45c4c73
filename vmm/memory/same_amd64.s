#include "textflag.h"

// func sameAVX2(a, b *[4096]byte) bool
//
// 256 bytes a round: what differs is left in Y0.
TEXT ·sameAVX2(SB), NOSPLIT, $0-17
	MOVQ a+0(FP), SI
	MOVQ b+8(FP), DI
	ADDQ $4096, SI
	ADDQ $4096, DI
	MOVQ $-4096, CX

round:
	VMOVDQU 0(SI)(CX*1), Y0
	VMOVDQU 32(SI)(CX*1), Y1
	VMOVDQU 64(SI)(CX*1), Y2
	VMOVDQU 96(SI)(CX*1), Y3
	VMOVDQU 128(SI)(CX*1), Y4
	VMOVDQU 160(SI)(CX*1), Y5
	VMOVDQU 192(SI)(CX*1), Y6
	VMOVDQU 224(SI)(CX*1), Y7
	VPXOR   0(DI)(CX*1), Y0, Y0
	VPXOR   32(DI)(CX*1), Y1, Y1
	VPXOR   64(DI)(CX*1), Y2, Y2
	VPXOR   96(DI)(CX*1), Y3, Y3
	VPXOR   128(DI)(CX*1), Y4, Y4
	VPXOR   160(DI)(CX*1), Y5, Y5
	VPXOR   192(DI)(CX*1), Y6, Y6
	VPXOR   224(DI)(CX*1), Y7, Y7
	VPOR    Y1, Y0, Y0
	VPOR    Y3, Y2, Y2
	VPOR    Y5, Y4, Y4
	VPOR    Y7, Y6, Y6
	VPOR    Y2, Y0, Y0
	VPOR    Y6, Y4, Y4
	VPOR    Y4, Y0, Y0
	VPTEST  Y0, Y0
	JNZ     differ
	ADDQ    $256, CX
	JNZ     round

	VZEROUPPER
	MOVB $1, ret+16(FP)
	RET

differ:
	VZEROUPPER
	MOVB $0, ret+16(FP)
	RET
